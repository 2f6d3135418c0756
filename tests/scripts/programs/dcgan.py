"""In the style of the well-known DCGAN: generator and discriminator, each spread over ngpu devices in its forward."""

import argparse
import random

import torch
import torch.nn as nn
import torch.nn.parallel
import torch.optim as optim

parser = argparse.ArgumentParser()
parser.add_argument("--niter", type=int, default=4)
parser.add_argument("--batchSize", type=int, default=16)
parser.add_argument("--ngpu", type=int, default=2)
parser.add_argument("--manualSeed", type=int, default=7)
opt = parser.parse_args()

random.seed(opt.manualSeed)
torch.manual_seed(opt.manualSeed)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
nz, width = 8, 6


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.1)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, width, 4, 1, 0, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


netG, netD = Generator().to(device), Discriminator().to(device)
if opt.ngpu > 1:
    netG = nn.DataParallel(netG, list(range(opt.ngpu)) if torch.cuda.device_count() >= opt.ngpu else None)
    netD = nn.DataParallel(netD, list(range(opt.ngpu)) if torch.cuda.device_count() >= opt.ngpu else None)
netG.apply(weights_init)
netD.apply(weights_init)

criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
real_batches = torch.rand(opt.niter, opt.batchSize, 1, 8, 8) * 2 - 1
for i, real in enumerate(real_batches):
    netD.zero_grad()
    label = torch.full((opt.batchSize,), 1.0, device=device)
    output = netD(real.to(device))
    errD_real = criterion(output, label)
    errD_real.backward()

    fake = netG(torch.randn(opt.batchSize, nz, 1, 1, device=device))
    label.fill_(0.0)
    output = netD(fake.detach())
    errD_fake = criterion(output, label)
    errD_fake.backward()
    optimizerD.step()

    netG.zero_grad()
    label.fill_(1.0)
    errG = criterion(netD(fake), label)
    errG.backward()
    optimizerG.step()
    print(f"[{i}/{opt.niter}] Loss_D: {(errD_real + errD_fake).item():.6f} Loss_G: {errG.item():.6f}")

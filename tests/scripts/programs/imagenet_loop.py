"""In the style of the well-known ImageNet program: arguments, meters, accuracy, validation, checkpoints, resuming."""

import argparse
import os
import shutil
import tempfile

import torch
import torch.nn as nn
import torch.nn.parallel
import torch.optim
import torch.utils.data
from torch.optim.lr_scheduler import StepLR

parser = argparse.ArgumentParser(description="Classifier training")
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=20, type=int)
parser.add_argument("--lr", "--learning-rate", default=0.1, type=float, dest="lr")
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, dest="weight_decay")
parser.add_argument("--seed", default=6, type=int)


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    def __str__(self):
        return f"{self.name} {self.sum / self.count:.5f}"


class SmallNet(nn.Module):
    def __init__(self, num_classes=5):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.classifier = nn.Linear(72, num_classes)

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = SmallNet()
    model.features = torch.nn.DataParallel(model.features)  # the classifier is small: it stays in one place
    model.to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    labels = torch.randint(5, (60,))
    images = torch.rand(60, 3, 14, 14) + labels.view(-1, 1, 1, 1) / 5
    dataset = torch.utils.data.TensorDataset(images, labels)
    loader = torch.utils.data.DataLoader(dataset, args.batch_size, shuffle=True)
    val_loader = torch.utils.data.DataLoader(dataset, args.batch_size)
    folder, best = tempfile.mkdtemp(), float("inf")
    for epoch in range(args.epochs):
        train(loader, model, criterion, optimizer, epoch, device)
        loss = validate(val_loader, model, criterion, device)
        scheduler.step()
        state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, os.path.join(folder, "checkpoint.pth.tar"))
        if loss < best:
            best = loss
            shutil.copyfile(os.path.join(folder, "checkpoint.pth.tar"), os.path.join(folder, "best.pth.tar"))
    checkpoint = torch.load(os.path.join(folder, "best.pth.tar"), map_location=device)
    model.load_state_dict(checkpoint["state_dict"])
    validate(val_loader, model, criterion, device)
    shutil.rmtree(folder)


def train(loader, model, criterion, optimizer, epoch, device):
    losses = AverageMeter("Loss")
    model.train()
    for i, (images, target) in enumerate(loader):
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"Epoch: [{epoch}][{i}/{len(loader)}] {losses}")


def validate(loader, model, criterion, device):
    losses = AverageMeter("Loss")
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images.to(device))
            losses.update(criterion(output, target.to(device)).item(), images.size(0))
    print(f"Test: {losses}")
    return losses.sum / losses.count


if __name__ == "__main__":
    main()

"""多 GPU 入门：随机数据、一个线性层，每批打印输入和输出的大小。"""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(1)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class Noise(Dataset):
    def __init__(self, num_rows, num_features):
        self.rows = torch.randn(num_rows, num_features)

    def __getitem__(self, index):
        return self.rows[index]

    def __len__(self):
        return len(self.rows)


class Net(nn.Module):
    def __init__(self, num_in, num_out):
        super().__init__()
        self.fc = nn.Linear(num_in, num_out)

    def forward(self, x):
        y = self.fc(x)
        print("    模型内部: 输入", list(x.size()), "输出", list(y.size()))
        return y


net = Net(5, 2)
if torch.cuda.device_count() > 1:
    print("使用", torch.cuda.device_count(), "块 GPU")
    net = nn.DataParallel(net)
net.to(device)

for batch in DataLoader(Noise(100, 5), batch_size=30, shuffle=True):
    out = net(batch.to(device))
    print("外部: 输入", list(batch.size()), "输出", list(out.size()), "loss", out.pow(2).mean().item())

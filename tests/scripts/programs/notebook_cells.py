# 由笔记本导出的脚本：单元格一个接一个，模型用 DataParallel 包裹之后再训练几步

# In[1]:
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

# In[2]: 参数
features, classes, batch_size = 6, 3, 16
torch.manual_seed(2)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

# In[3]: 数据
x = torch.rand(72, features)
y = (x.sum(1) * 3 % classes).long()
loader = DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)


# In[4]: 模型
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(features, 12), nn.Linear(12, classes)])

    def forward(self, inputs):
        hidden = torch.tanh(self.layers[0](inputs))
        return self.layers[1](hidden)


# In[5]:
model = Classifier()
if torch.cuda.device_count() > 1:
    print("可用的 GPU:", torch.cuda.device_count())
    model = nn.DataParallel(model)
model = model.to(device)
model

# In[6]: 训练
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = 1
for inputs, target in loader:
    optimizer.zero_grad()
    loss = nn.CrossEntropyLoss()(model(inputs.to(device)), target.to(device))
    loss.backward()
    optimizer.step()
    print("第", step, "步 loss", loss.item())
    step += 1

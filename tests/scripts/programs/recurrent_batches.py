"""循环网络和 DataParallel：长短不一的序列、total_length、保存和恢复检查点，以及 isinstance 判断。"""

import io

import torch
from torch import nn
from torch.nn import DataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.manual_seed(4)
use_gpu = torch.cuda.is_available()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, tokens, lengths):
        total = tokens.size(1)  # 每个副本都补到同样的长度
        packed = pack_padded_sequence(self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=total)
        return self.out(states)


def unwrapped(model):
    return model.module if isinstance(model, nn.DataParallel) else model


model = DataParallel(Tagger(), device_ids=[0, 1] if use_gpu and torch.cuda.device_count() > 1 else None)
assert type(model) is nn.parallel.DataParallel
if use_gpu:
    model = model.cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
tokens, tags = torch.randint(50, (12, 9)), torch.randint(4, (12, 9))
lengths = torch.tensor([9, 3, 5, 7, 2, 9, 4, 6, 8, 1, 5, 3])
if use_gpu:
    tokens, tags = tokens.cuda(), tags.cuda()
for epoch in range(4):
    scores = model(tokens, lengths)
    loss = nn.functional.cross_entropy(scores.reshape(-1, 4), tags.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.6f}")

file = io.BytesIO()
torch.save(model, file)  # 整个模型
torch.save(unwrapped(model).state_dict(), io.BytesIO())
file.seek(0)
again = torch.load(file, weights_only=False)
with torch.no_grad():
    print("restored loss", nn.functional.cross_entropy(again(tokens, lengths).reshape(-1, 4), tags.reshape(-1)).item())

"""In the style of the well-known word language model: time first, so that rows are on dim=1; the state goes along."""

import argparse
import math

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--bptt", type=int, default=7)
parser.add_argument("--batch_size", type=int, default=10)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--clip", type=float, default=0.25)
args = parser.parse_args()
torch.manual_seed(8)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ntokens = 40


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nhid = nhid

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return self.decoder(self.drop(output)), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(1, bsz, self.nhid), weight.new_zeros(1, bsz, self.nhid)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous().to(device)


def get_batch(source, i):
    length = min(args.bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].reshape(-1)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


corpus = (torch.arange(600) * 7 + torch.randint(3, (600,))) % ntokens
train_data, val_data = batchify(corpus[:400], args.batch_size), batchify(corpus[400:], args.batch_size)
model = nn.DataParallel(RNNModel(ntokens, 12, 12, args.dropout), dim=1).to(device)
criterion = nn.CrossEntropyLoss()


def evaluate(source):
    model.eval()
    total, hidden = 0.0, model.module.init_hidden(args.batch_size)
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, args.bptt):
            data, targets = get_batch(source, i)
            output, hidden = model(data, hidden)
            total += len(data) * criterion(output.reshape(-1, ntokens), targets).item()
    return total / (len(source) - 1)


lr = 2.0
for epoch in range(1, 3):
    model.train()
    hidden = model.module.init_hidden(args.batch_size)
    for i in range(0, train_data.size(0) - 1, args.bptt):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output.reshape(-1, ntokens), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
    val_loss = evaluate(val_data)
    print(f"epoch {epoch} | train loss {loss.item():.5f} | valid loss {val_loss:.5f} | ppl {math.exp(val_loss):.4f}")

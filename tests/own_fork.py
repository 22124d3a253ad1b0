"""A fork: a module with an entry of its own in each dictionary, for test_kinds.py."""

import torch

import adapter
import bert
import data
import fusion
import train


class OwnBert(bert.Bert):
    """Its positions begin at a random one, which is drawn again wherever it is built."""

    def __init__(self, config):
        super().__init__(config)
        self.first = torch.randint(20, ()).item()

    def positions(self, input_ids):
        return super().positions(input_ids) + self.first


class OwnConfig(adapter.AdapterConfig):
    def modules(self, bert):
        d = bert.config.hidden_size
        return {key: Own(self, d, self.bottleneck_size(d, 0)) for key in super().modules(bert)}


class Own(adapter.Adapter):
    """It trains U alone, and its z, with a constant in a buffer, is no bottleneck's."""

    def __init__(self, *values):
        super().__init__(*values)
        self.down.requires_grad_(False)
        self.register_buffer("factor", torch.tensor([4.0]), persistent=False)

    def z(self, h):
        return (self.factor * super().z(h)).to(h.dtype)


class Scaled(fusion.Fusion):
    def __init__(self, *values, power=1.0):
        super().__init__(*values)
        self.power, self.deep = power, torch.nn.Sequential(torch.nn.Linear(1, 1))

    def softmax(self, scores):
        return super().softmax(self.power * self.deep(scores[..., None])[..., 0])


class MeanHead(adapter.Head):
    """It reads the mean over the real tokens, through a layer of its own."""

    def __init__(self, config, bert_config):
        super().__init__(config, bert_config)
        self.mlp = torch.nn.Linear(bert_config.hidden_size, bert_config.hidden_size)

    def forward(self, h, mask):
        mean = (h * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return super().forward(self.mlp(mean))


class Gated(torch.nn.Module):
    """A parameter, one that stays as it was drawn, and a buffer that changes in training."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Parameter(torch.ones(1))
        self.drawn = torch.nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, f, x, norm):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * f.detach().mean()
        return norm(f * self.gate + x) + self.mean * self.drawn.mean()


def build_own(args, bert, task):
    """An adapter, all biases, a prompt, and a module of a fork's own."""
    adapter.add_adapter(bert, task.name, adapter.ADAPTERS[args.adapter](**args.adapter_config))
    for name, p in bert.theta().items():
        p.requires_grad_(name.endswith("bias"))
    bert.prompt = torch.nn.Parameter(torch.randn(1, 1, bert.config.hidden_size))
    bert.embeddings_norm.register_forward_hook(lambda module, given, x: x + bert.prompt)
    bert.layers[1].attention_add_norm.adapters["gated"] = Gated()
    bert.layers[1].attention_add_norm.active = "gated"


bert.ENCODERS["own"] = OwnBert
adapter.ADAPTERS["own"] = OwnConfig
fusion.FUSIONS["own"] = Scaled
adapter.HEADS["own"] = MeanHead
train.STAGES["own"] = {"lr": 5e-3, "epochs": 2, "build": build_own}
data.TASKS["own"] = data.Task(None, ("sentence1", "sentence2"), [*"012345"])

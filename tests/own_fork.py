"""A fork: a module with an entry of its own in each dictionary, for test_kinds.py."""

import torch

import adapter
import bert
import data
import fusion
import train


class OwnBert(bert.Bert):
    def positions(self, input_ids):
        return super().positions(input_ids) + 3


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


def adapter_and_biases(args, bert, task):
    adapter.add_adapter(bert, task.name, adapter.ADAPTERS[args.adapter](**args.adapter_config))
    for name, p in bert.own_parameters().items():
        p.requires_grad_(name.endswith("bias"))


bert.ENCODERS["own"] = OwnBert
adapter.ADAPTERS["own"] = OwnConfig
fusion.FUSIONS["own"] = Scaled
adapter.HEADS["own"] = MeanHead
train.STAGES["own"] = {"lr": 5e-3, "epochs": 2, "build": adapter_and_biases}
data.TASKS["own"] = data.Task(None, ("sentence1", "sentence2"), [*"012345"])

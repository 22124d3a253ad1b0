"""Google's checkpoints: TensorFlow's "tensor bundle" (tensorflow/core/util/tensor_bundle), read
with numpy.

The index file is a LevelDB table: name -> where the tensor is. The data files hold the raw numbers.
"""

import math
from functools import partial

import google_crc32c
import numpy as np
import torch

from formats.files import error_prefix

TABLE_MAGIC = 0xDB4775248B80FB57
FLOAT_TYPES = {1: "<f4", 2: "<f8", 19: "<f2"}  # DT_FLOAT, DT_DOUBLE, DT_HALF -> numpy's

# the protocol-buffer messages of the index: field number -> name
HEADER = {1: "shards", 2: "big_endian"}
ENTRY = {1: "dtype", 2: "shape", 3: "shard", 4: "offset", 5: "size", 6: "crc"}
SHAPE, DIMENSION = {2: "dimensions"}, {1: "size"}


def read_tensorflow(path):
    """{name: function that reads the tensor} for the variables in a TensorFlow checkpoint, whose
    `.index` file is at `path`. Raises ValueError, here or when a tensor is read, for a damaged
    file: every block and tensor that is read is checked against its CRC-32C. Compressed, big-endian
    and partitioned variables, which Google's releases do not have, are refused."""
    with error_prefix(path):
        entries = table_entries(path.read_bytes())
        header = protobuf(entries.pop("", b""), HEADER)
        if header.get("big_endian"):
            raise ValueError("a big-endian checkpoint, which is not supported")
    shards, tensors = header.get("shards", 1), {}
    for name, message in entries.items():
        entry = protobuf(message, ENTRY)
        data = path.with_name(f"{path.stem}.data-{entry.get('shard', 0):05d}-of-{shards:05d}")
        tensors[name] = partial(bundle_tensor, name, entry, data)
    return tensors


def bundle_tensor(name, entry, data):
    """One tensor of a bundle, from its data file: a kernel is copied, transposed, anything else a
    view of the mapped file."""
    if entry.get("dtype") not in FLOAT_TYPES:
        raise ValueError(f"{name} has TensorFlow type {entry.get('dtype')}, expected a float type")
    dtype = np.dtype(FLOAT_TYPES[entry["dtype"]])
    dimensions = protobuf(entry.get("shape", [b""])[-1], SHAPE).get("dimensions", [])
    shape = tuple(protobuf(dimension, DIMENSION).get("size", 0) for dimension in dimensions)
    offset, size = entry.get("offset", 0), entry.get("size", 0)
    if not 0 < math.prod(shape) * dtype.itemsize == size <= data.stat().st_size - offset:
        found = f"{size} bytes at {offset} of {data.name}, which is cut off, or damaged"
        raise ValueError(f"{name}: shape {list(shape)} in {dtype} is not {found}")
    # mode "c", copy on write: the tensor may be changed, the file never is
    array = np.memmap(data, dtype=dtype, mode="c", offset=offset, shape=shape)
    view = array.view()
    view.flags.writeable = False  # google_crc32c takes no buffer that could change
    if not intact(view, entry.get("crc", 0)):
        raise ValueError(f"{name} in {data.name} does not match its checksum: the file is damaged")
    tensor = torch.from_numpy(np.require(array, requirements="A"))
    if not name.endswith("/kernel"):
        return tensor
    # A view .T would do, but not add up in the same order. The memory is numpy's, which asks for
    # huge pages: that halves the time.
    return torch.from_numpy(np.empty(shape[::-1], np.float32)).copy_(tensor.T)


def table_entries(table):
    """{key: value} of a LevelDB table (leveldb/doc/table_format.md): blocks of entries, and a block
    of their places."""
    if len(table) < 48 or int.from_bytes(table[-8:], "little") != TABLE_MAGIC:
        raise ValueError("not the index of a TensorFlow checkpoint, or cut off")
    # the footer: offset and size of the metaindex block, which is not needed, and of the index
    _, _, offset, size, _ = varints(table, len(table) - 48, 4)
    entries = {}
    for _, place in block_entries(table, offset, size):
        offset, size, _ = varints(place, 0, 2)
        for key, value in block_entries(table, offset, size):
            entries[key.decode("latin-1")] = value
    return entries


def block_entries(table, offset, size):
    """(key, value) pairs of one block; a key shares its beginning with the one before."""
    block, trailer = table[offset : offset + size], table[offset + size : offset + size + 5]
    if not intact(block + trailer[:1], int.from_bytes(trailer[1:], "little")):
        raise ValueError(f"the block at {offset} does not match its checksum: the file is damaged")
    if trailer[0] != 0:
        raise ValueError("its blocks are compressed, which is not supported")
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")  # the restart points are not needed
    position, key = 0, b""
    while position < end:
        shared, unshared, length, position = varints(block, position, 3)
        key = key[:shared] + block[position : position + unshared]
        position += unshared + length
        yield key, block[position - length : position]


def protobuf(message, names):
    """{name: value} of a protocol-buffer message: numbers, the last one counts, and lists of byte
    strings. names: {field number: name}; other fields are skipped."""
    result, position = {}, 0
    while position < len(message):
        tag, position = varints(message, position)
        name, wire_type = names.get(tag >> 3), tag & 7
        if wire_type == 0:
            value, position = varints(message, position)
        elif wire_type == 2:
            length, position = varints(message, position)
            value = [*result.get(name, []), message[position : position + length]]
            position += length
        else:
            length = {1: 8, 5: 4}[wire_type]
            value = int.from_bytes(message[position : position + length], "little")
            position += length
        if name:
            result[name] = value
    return result


def varints(data, position, count=1):
    """`count` base-128 integers -> (*integers, next position)"""
    integers, integer, shift = [], 0, 0
    while len(integers) < count:
        integer |= (data[position] & 0x7F) << shift
        shift += 7
        if data[position] < 0x80:
            integers.append(integer)
            integer = shift = 0
        position += 1
    return *integers, position


def intact(data, crc):
    """Whether data has this CRC-32C, which LevelDB stores rotated by 15 bits plus a constant.
    google_crc32c, Google's small library around the processor's own instruction, takes 0.04 s for
    BERT-base; numpy alone would take seconds."""
    crc = (crc - 0xA282EAD8) & 0xFFFFFFFF
    return google_crc32c.value(data) == ((crc >> 17) | (crc << 15)) & 0xFFFFFFFF

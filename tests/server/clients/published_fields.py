"""Compares our fields with those of published stubs: `published_fields.py SET SERVICE MODULE ...`.

SET is the descriptor set of our interface, SERVICE its full name, the modules are those of the
stubs. It runs in the environment of a client, both definitions in one process, and prints the
number of fields.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool


def compare(ours: Any, theirs: Any) -> int:
    """How many fields a message has; each has the number and type of theirs."""
    for field in ours.fields:
        other = theirs.fields_by_name[field.name]
        told = (field.number, field.type, field.is_repeated, field.has_presence)
        theirs_told = (other.number, other.type, other.is_repeated, other.has_presence)
        assert told == theirs_told, field.full_name
    nested = [compare(n, theirs.nested_types_by_name[n.name]) for n in ours.nested_types]
    return len(ours.fields) + sum(nested)


def main(path: str, service: str, *modules: str) -> None:
    (file,) = FileDescriptorSet.FromString(Path(path).read_bytes()).file
    pool = DescriptorPool()
    pool.Add(file)
    published = [import_module(module) for module in modules]
    number = 0
    for message in file.message_type:
        home = next(module for module in published if hasattr(module, message.name))
        ours = pool.FindMessageTypeByName(f"{file.package}.{message.name}")
        number += compare(ours, getattr(home, message.name).DESCRIPTOR)
    theirs = published[0].DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
    assert theirs.full_name == service
    for method in pool.FindServiceByName(service).methods:
        other = theirs.methods_by_name[method.name]
        assert method.input_type.name == other.input_type.name
        assert method.output_type.name == other.output_type.name
        told = (method.client_streaming, method.server_streaming)
        assert told == (other.client_streaming, other.server_streaming)
    print(number)


if __name__ == "__main__":
    main(*sys.argv[1:])

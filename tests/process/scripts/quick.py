"""Loaded before torch: leaves out parts of it that take longer to load than all the rest.

Making an optimizer would load torch's compiler; ``import torch`` loads the rules for export and for tensors without
data. Nothing is compiled or exported in these tests, and they start hundreds of processes.
"""

import importlib.abc
import importlib.util
import sys


def _anything(name):
    # DDP tells the compiler about itself.
    if name.startswith("__"):
        raise AttributeError(name)
    from unittest.mock import MagicMock

    return MagicMock()


def _no_compiler(module):
    module.disable = lambda function, *_, **__: function
    module.graph_break = lambda: None
    module.__getattr__ = _anything


def _no_rules(module):
    # Else done by a module that only those rules need.
    import torch

    if hasattr(torch._C, "_set_generator_metaclass"):
        from torch._opaque_base import OpaqueBaseMeta

        torch._C._set_generator_metaclass(OpaqueBaseMeta)


PARTS = {"torch._dynamo": _no_compiler, "torch._meta_registrations": _no_rules, "torch.export": lambda module: None}


class _Without(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes empty modules."""

    def find_spec(self, fullname, path=None, target=None):
        return importlib.util.spec_from_loader(fullname, self) if fullname in PARTS else None

    def exec_module(self, module):
        PARTS[module.__name__](module)


if "torch" not in sys.modules:
    sys.meta_path.insert(0, _Without())

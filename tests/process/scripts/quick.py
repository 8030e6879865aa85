"""Loaded before torch: making an optimizer would load torch's compiler, which takes as long as torch itself.

Nothing is compiled in these tests, and they start hundreds of processes.
"""

import sys
import types

compiler = types.ModuleType("torch._dynamo")
compiler.disable = lambda function, *_, **__: function
compiler.graph_break = lambda: None
sys.modules["torch._dynamo"] = compiler

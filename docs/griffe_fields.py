"""Extension of Griffe: the help of a dataclass field, `documented(default, text)` or `setting(...)`, documents it."""

import ast
import dataclasses
import importlib

import griffe


class DocumentedFields(griffe.Extension):
    """Take the default of fields from the call that makes them, and the text from the class."""

    def on_attribute_instance(self, *, node, attr, agent, **_):
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("documented", "setting"):
            owner = getattr(importlib.import_module(attr.module.path), attr.parent.name)
            text = next(
                field for field in dataclasses.fields(owner) if field.name == attr.name
            ).metadata["help"]
            attr.docstring = griffe.Docstring(text, parent=attr)
            default = call.args[0]
            attr.value = None if getattr(default, "id", "") == "MISSING" else ast.unparse(default)

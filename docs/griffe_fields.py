"""Extension of Griffe: the help of a dataclass field, `documented(default, text)` or `setting(...)`, documents it."""

import ast

import griffe


class DocumentedFields(griffe.Extension):
    """Take the default and the text of fields from the call that makes them."""

    def on_attribute_instance(self, *, node, attr, agent, **_):
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("documented", "setting"):
            default, text = call.args[:2]
            attr.docstring = griffe.Docstring(ast.literal_eval(text), parent=attr)
            attr.value = None if getattr(default, "id", "") == "MISSING" else ast.unparse(default)

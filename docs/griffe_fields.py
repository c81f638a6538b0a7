"""Extension of Griffe: the help text of a dataclass field, `documented(default, text)`, is its documentation."""

import ast

import griffe


class DocumentedFields(griffe.Extension):
    """Take the default and the text of fields from the call that makes them."""

    def on_attribute_instance(self, *, node, attr, agent, **_):
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "documented":
            default, text = call.args[:2]
            attr.docstring = griffe.Docstring(ast.literal_eval(text), parent=attr)
            attr.value = None if getattr(default, "id", "") == "MISSING" else ast.unparse(default)

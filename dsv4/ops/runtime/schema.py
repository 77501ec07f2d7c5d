"""An operator's schema, from its argument table."""

from __future__ import annotations

from dsv4.kernels.kit.args import TensorArg, optional_of, required_of


def schema_of(name: str, table: tuple) -> str:
    """Schema of an operator that writes its outputs and returns nothing.

    Required tensors, nullable ones among them, the runner's id, then optional tensors, None where
    they are not given.
    """
    aliases = iter("abcdefghijklmnopqrstuvwxyz")

    def tensor(arg: TensorArg) -> str:
        alias = f"({next(aliases)}!)" if arg.is_output else ""
        mark = "?" if arg.may_be_none else ""
        default = "=None" if arg.is_optional else ""
        return f"Tensor{alias}{mark} {arg.name}{default}"

    parts = [tensor(arg) for arg in required_of(table)]
    parts += ["int runner_id"]
    parts += [tensor(arg) for arg in optional_of(table)]
    return f"{name}({', '.join(parts)}) -> ()"

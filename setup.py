"""Build step that pyproject.toml cannot declare: the demo's checkpoint travels in the wheel."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CHECKPOINT = Path(__file__).resolve().parent / "checkpoints" / "tiny"


class BuildWithCheckpoint(build_py):
    """`build_py` that puts `checkpoints/tiny` beside the modules, where `dsv4 demo` looks for it.

    An editable install uses the folder of the checkout.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.mkpath(str(self._target))
            for file in self._files():
                self.copy_file(str(file), str(self._target / file.name))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """List what `run` writes: a wheel holds nothing else."""
        return [
            *super().get_outputs(include_bytecode),
            *(str(self._target / file.name) for file in self._files()),
        ]

    @property
    def _target(self) -> Path:
        return Path(self.build_lib) / "dsv4" / "checkpoints" / "tiny"

    def _files(self) -> list[Path]:
        return sorted(file for file in CHECKPOINT.iterdir() if file.is_file())


setup(cmdclass={"build_py": BuildWithCheckpoint})

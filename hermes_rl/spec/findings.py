"""A list of problems and warnings, each at its place in the spec."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hermes_rl.errors import Problem
from hermes_rl.spec.model import Spec
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.templates import TemplateError
from hermes_rl.spec.validate import in_order


class Findings:
    """Collects what checks find about one spec."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._problems: list[Problem] = []
        self._warnings: list[Problem] = []

    def problem(self, path: NodePath, message: str, *, at: Literal["key", "value"] = "value") -> None:
        """Something that will not work."""
        self._problems.append(self.spec.problem(path, message, at=at))

    def warning(self, path: NodePath, message: str, *, at: Literal["key", "value"] = "value") -> None:
        """Something that may not work, or could not be told."""
        self._warnings.append(self.spec.problem(path, message, at=at))

    def template(self, path: NodePath, error: TemplateError, file: Path | None = None) -> None:
        """Add a template that does not work, at its line in the spec or in a file of its own."""
        if file is None:
            self._problems.append(self.spec.template_problem(path, error))
        else:
            row = f" (row {error.row})" if error.row else ""
            self._problems.append(Problem(str(file), error.line or 1, 1, f"{error.message}{row}"))

    def extend(self, problems: list[Problem], warnings: list[Problem]) -> None:
        """Add what another check has found."""
        self._problems += problems
        self._warnings += warnings

    def result(self) -> tuple[list[Problem], list[Problem]]:
        """Problems and warnings in the order of their places."""
        return in_order(self._problems), in_order(self._warnings)

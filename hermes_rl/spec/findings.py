"""Problems and warnings at their places in the spec: a list of them, and errors of rows that name their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from hermes_rl.errors import Problem, SpecError, UserError
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

    def problem(self, path: NodePath, message: str, *, part: Literal["key", "value"] = "value") -> None:
        """Add a problem: an error in the spec that prevents a run."""
        self._problems.append(self.spec.problem(path, message, part=part))

    def warning(self, path: NodePath, message: str, *, part: Literal["key", "value"] = "value") -> None:
        """Add a warning: a fault that may not prevent a run, or a fact that could not be checked."""
        self._warnings.append(self.spec.problem(path, message, part=part))

    def template(self, path: NodePath, error: TemplateError, file: Path | None = None) -> None:
        """Add a problem for a template that fails, at its line in the spec or in its own file."""
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
        """Return the problems and warnings, each ordered by position."""
        return in_order(self._problems), in_order(self._warnings)


@contextmanager
def locating(spec: Spec, key: str, path: NodePath = ()) -> Iterator[None]:
    """Let an error of the user's input that comes from a row name the row and the place in the spec, as `validate`
    does. `path` is the place if the error has none."""
    try:
        yield
    except SpecError:
        raise
    except TemplateError as error:
        error.row = error.row or key
        raise SpecError([spec.row_problem(error, path)]) from error.__cause__
    except UserError as error:
        raise SpecError([spec.row_problem(TemplateError(str(error), row=key), path)]) from error.__cause__

"""What all descriptions share: frozen, no unknown fields, no silent conversion of types."""

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """A description. `strict` refuses "4" for 4 and 1.5 for an int; `frozen` keeps data flowing forward."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PlanError(ValueError):
    """Everything that is wrong with what the user asked for, at once.

    Each fault is one sentence with its arithmetic and a way out.
    """

    def __init__(self, subject: str, faults: list[str]) -> None:
        assert faults, "an error needs a fault"
        self.subject = subject
        self.faults = faults
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        lines = [f"{subject}: {count}"] + [f"  {i}. {fault}" for i, fault in enumerate(faults, 1)]
        super().__init__("\n".join(lines))


class RunError(RuntimeError):
    """A run that failed for a reason which the user can be told in a sentence. Not wrong input: that is a PlanError."""

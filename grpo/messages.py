"""Layer 0 - the chat protocol. Knows nothing of tokens."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Message:
    role: Role
    content: str

    def as_dict(self) -> dict[str, str]:
        """The form that chat templates take."""
        return {"role": self.role, "content": self.content}

"""Questions: what a request to the page's server holds, and which look answers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from regard.explore.server.models import Models

if TYPE_CHECKING:
    from regard.explore.inside import Look

PartName = Literal["encoder", "decoder", "cross"]


class Frame(Response):
    media_type = "application/octet-stream"


class Asked(BaseModel):
    """A question. A field of another type or name is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    run: str
    text: str | None = None
    target: str | None = None
    image: str | None = None
    changes: dict[str, Any] = Field(default_factory=dict)
    step: int | None = None

    def look(self, models: Models, *, unchanged: bool = False) -> Look:
        from regard.explore.changes import Changes

        changes = Changes.from_dict({} if unchanged else self.changes)
        return models.look((self.run, self.text, self.target, self.image, self.step), changes)

"""Calls of an actor that wait for the reply of a host."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from ray_ckpt.core.values import Token


class Callers:
    """Calls that wait, each with a token; `left` is called with the token of a call that is over."""

    def __init__(self, left: Callable[[Token], None] = lambda token: None) -> None:
        self._left = left
        self._waiting: dict[Token, asyncio.Future[Any]] = {}

    async def request(self, begin: Callable[[Token], None]) -> Any:
        """Call `begin` with a fresh token; return the reply to the token, or raise its error."""
        token = uuid.uuid4().hex
        reply = self._waiting[token] = asyncio.get_running_loop().create_future()
        try:
            begin(token)
            return await reply
        finally:
            del self._waiting[token]
            self._left(token)

    def reply(self, token: Token, value: object) -> None:
        """Answer the call of a token, unless the call is over."""
        if (future := self._waiting.get(token)) and not future.done():
            future.set_result(value)

    def fail(self, token: Token, error: Exception) -> None:
        """Make the call of a token raise an error, unless the call is over."""
        if (future := self._waiting.get(token)) and not future.done():
            future.set_exception(error)

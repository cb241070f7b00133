"""The recorded history for the surfaces, read off the loop: a hung disk costs an answer, never the loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from pathlib import Path

from supervisord_vllm.status import Document, history_document
from supervisord_vllm.store import History, StoreError

PATIENCE_S = 5.0


class Recorded:
    """Reads ``history_document`` of one store, one reading at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reading: asyncio.Future[Document] | None = None

    async def document(self, name: str) -> Document:
        """The history of the instance.

        Raises:
            StoreError: it cannot be read, or not within 5 s.
        """
        if self._reading is None or self._reading.done():
            self._reading = self._begin(name)
        try:
            return await asyncio.wait_for(asyncio.shield(self._reading), PATIENCE_S)
        except asyncio.TimeoutError:
            raise StoreError(f"store {self._path} does not answer within {PATIENCE_S:g} s") from None

    def _begin(self, name: str) -> asyncio.Future[Document]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Document] = loop.create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asked may be gone

        def settle(document: Document | None, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            elif document is not None:
                answer.set_result(document)

        def read() -> None:
            document, failure = None, None
            try:
                document = self._read(name)
            except (StoreError, OSError, ValueError) as error:
                failure = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, document, failure)

        # Its own daemon thread: an executor's hung thread would hold up the interpreter's exit.
        threading.Thread(target=read, name="history", daemon=True).start()
        return answer

    def _read(self, name: str) -> Document:
        history = History.open(self._path)
        if history is None:
            raise StoreError(f"there is no store at {self._path}")
        with closing(history):
            return history_document(name, history)

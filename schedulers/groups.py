"""Completions of one prompt, which can share its blocks."""

from __future__ import annotations

from .entry import Entry, State


class Groups:
    """Which live requests are completions of one prompt."""

    def __init__(self) -> None:
        self._members: dict[str, dict[str, Entry]] = {}

    def add(self, entry: Entry) -> None:
        """Take note of a request."""
        request = entry.request
        if request.params.n > 1:
            self._members.setdefault(request.parent_id, {})[request.request_id] = entry

    def remove(self, entry: Entry) -> None:
        """Forget a request."""
        members = self._members.get(entry.request.parent_id)
        if members is not None:
            members.pop(entry.request_id, None)
            if not members:
                del self._members[entry.request.parent_id]

    def others(self, entry: Entry) -> list[Entry]:
        """Who could share the prompt that a waiting request is about to compute: those of its group
        that wait without having generated anything, in order of arrival. None if it has generated
        something itself."""
        members = self._members.get(entry.request.parent_id)
        if members is None or entry.request.output_token_ids:
            return []
        return [
            member
            for member in members.values()
            if member is not entry
            and member.state is State.WAITING
            and not member.request.output_token_ids
        ]

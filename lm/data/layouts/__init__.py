"""Layouts of records: a chat, a question with its reply, a prompt with its completion, or text.

A record is known by its `keys`. The `reader` makes messages of it, by `turns`, or prompt and
completion, or leaves it text. What it has besides is added to the messages (a system prompt,
tools), or is not read: ids, numbers and labels are counted in `notes`, and what may be content, by
its `values`, is refused, with `advice`. A record of preferences becomes two: see `pairs`.
"""

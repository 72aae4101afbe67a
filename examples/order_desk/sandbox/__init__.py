"""The outside world of the order desk: four small providers, each a server process with its own storage.

    python -m examples.order_desk.sandbox --provider pay --port 8701 --data var/sandbox

`desks.py` says what each provider offers, `store.py` what it remembers, `faults.py` how it may misbehave, `server.py`
speaks HTTP, `page.py` draws the page on which a person counts the true effects. Nothing here knows Aftercall: tests
count effects in this world, never in our own rows.
"""

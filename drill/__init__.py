"""The drill: Aftercall is broken everywhere, and the world is asked what happened. See docs/drill.md."""

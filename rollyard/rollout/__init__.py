"""Station 2: ask, K times. The scheduling core is pure; `controller` is the asyncio shell around it."""

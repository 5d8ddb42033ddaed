"""The commands of `crossdock bench`, one module each. They measure a served cluster at its clients.

Start with `serve`. `launcher.load` makes and sends the load. Single parts are measured by `benchmarks`, which is not installed.
"""

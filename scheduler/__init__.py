"""The scheduler: which request runs where and when. Pure: `now` is an argument, and nothing here knows messages' senders,
bills or processes.
"""

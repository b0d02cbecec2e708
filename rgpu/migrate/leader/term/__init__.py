"""What every decision of one leader's term is made with: records as read, decisions by compare-and-swap, fenced
commands, locks, background work. It knows no verb and no session's story.
"""

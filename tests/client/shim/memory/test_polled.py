"""Words of mapped memory that a kernel polls: the CPU's change is sent while it runs, if it is one word's."""

from __future__ import annotations

BEGIN = """
        def pinned(size):
            p = P()
            ok(cu.cuMemHostAlloc(c.byref(p), SIZE(size), 2))
            return p.value
        def ask():
            assert cu.cuStreamQuery(P(s)) == 600
        context()
        f, small, large, s = kernel(), pinned(4096), pinned(1 << 17), stream()
        tell(1)
        hear()
        ok(launch(f, small + 64, 1, s))
        ok(launch(f, large + 64, 1, s))
"""


def sent(agent, program, text: str) -> list[tuple[int, bytes]]:
    """Return the words that are sent while the stream does nothing: offsets in the small range, and bytes."""
    run = program(agent, BEGIN + text)
    run.hear()
    agent.wait_for("stream_create")
    agent.held = {agent.args("stream_create")[0].stream}
    run.tell()
    run.end()
    small = agent.args("host_allocate")[0].address
    words = [record for record in agent.records if record.seq in agent.seqs("host_word_write")]
    assert not set(agent.held) & {args.stream for args in agent.args("host_word_write")}
    return [(args.address - small, bytes(record.payload))
            for args, record in zip(agent.args("host_word_write"), words, strict=True)]


def test_a_changed_word_is_sent_once(agent, program):
    assert sent(agent, program, """
        ask()
        c.memset(small + 1001, 0xab, 1)
        c.memset(small + 1006, 0xcd, 2)
        ask()
        ask()
        c.memset(small + 4095, 1, 1)
        e = event()
        ok(cu.cuEventRecord(P(e), P(s)))
        assert cu.cuEventQuery(P(e)) == 600
        """) == [(1001, b"\xab\0\0\0\0\xcd\xcd"), (4095, b"\1")]


def test_more_than_a_word_goes_with_the_next_launch(agent, program):
    """In which order the CPU wrote two words is not known: a flag must not come ahead of what it stands for."""
    assert sent(agent, program, """
        c.memset(small + 1007, 1, 2)
        ask()
        c.memset(small + 8, 1, 1)
        ask()
        ok(launch(f, small + 64, 1, s))
        c.memset(small + 1007, 2, 1)
        ask()
        """) == [(1007, b"\2")]
    small = agent.args("host_allocate")[0].address
    assert [args.address - small for args in agent.args("host_mirror_write")] == [8, 1007]


def test_large_ranges_are_not_compared(agent, program):
    assert sent(agent, program, """
        c.memset(large, 1, 1)
        ask()
        """) == []


def test_a_launch_on_another_stream_waits_for_the_word(agent, program):
    assert sent(agent, program, """
        c.memset(small, 1, 1)
        ask()
        ok(launch(f, small + 64, 2, stream()))
        """) == [(0, b"\1")]
    (word,), launch = agent.seqs("host_word_write"), agent.seqs("launch")[-1]
    assert any(word < seq < launch for seq in agent.seqs("stream_wait_event")) or word in agent.observed_before(launch)

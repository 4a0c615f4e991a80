"""The memory map: what is laid out where, from a history by hand and by chance."""

import random

import matplotlib.pyplot as plt

from shared.lessons.topic_15_07.memory_map import MIB, at_peak, draw_map, memory_map


def event(action, addr, size=0, **more):
    return {"action": action, "addr": addr, "size": size, "stream": 0} | more


BIG, SMALL = 1000 * MIB, 2000 * MIB
HISTORY = [
    event("segment_alloc", BIG, 20 * MIB),
    event("alloc", BIG, 3 * MIB, kind="parameter"),
    event("segment_alloc", SMALL, 2 * MIB),
    event("alloc", SMALL, 100, kind="batch"),
    event("free_requested", BIG),
    event("free_completed", BIG),
    event("alloc", BIG + 5 * MIB, MIB + 1),
    event("segment_free", SMALL, 2 * MIB),
]


def test_a_history_by_hand_is_laid_out_and_drawn():
    found = memory_map(HISTORY)
    assert (found.small, found.top) == (2 * MIB, 22 * MIB)  # the small pool lies at the bottom
    assert [tuple(span) for span in found.blocks] == [
        (1, 4, 2 * MIB, 3 * MIB, "parameter"),
        (3, 7, 0, 512, "batch"),
        (5, 7, 7 * MIB, MIB + 512, "block"),
    ]
    assert [tuple(span)[:4] for span in found.segments] == [(2, 6, 0, 2 * MIB), (0, 7, 2 * MIB, 20 * MIB)]
    assert found.reserved == [n * MIB for n in (0, 20, 20, 22, 22, 22, 22, 20)]
    assert found.active == [0, 0, 3 * MIB, 3 * MIB, 3 * MIB + 512, 512, MIB + 1024, MIB + 1024]
    moment, parts = at_peak(found)
    assert (moment, dict(parts)) == (3, {"parameter": 3 * MIB, "batch": 512})

    found.blocks.reverse()  # the order of deaths is another; names are in that of births
    figure, ax = plt.subplots()
    draw_map(ax, found, "by hand", names=["a", "b", "c"])
    texts = {text.get_text(): text.get_position() for text in ax.texts}
    assert (texts["a"], texts["b"], texts["c"][0]) == ((2.5, 3.5), (5.0, 256 / MIB), 6.0)
    named = [text.get_text() for text in ax.get_legend().get_texts()]
    assert named == ["parameter", "batch", "block", "reserved, free"]
    plt.close(figure)


def test_what_was_there_before_is_drawn_from_the_start_and_counts():
    blocks = [
        {"address": BIG, "size": 4 * MIB, "state": "active_allocated"},
        {"address": BIG + 4 * MIB, "size": 16 * MIB, "state": "inactive"},
    ]
    before = [{"address": BIG, "total_size": 20 * MIB, "blocks": blocks}]
    found = memory_map([event("alloc", BIG + 4 * MIB, 2 * MIB), event("free_completed", BIG)], before)
    assert [tuple(span) for span in found.blocks] == [
        (0, 1, 0, 4 * MIB, "there before"),
        (0, 2, 4 * MIB, 2 * MIB, "block"),
    ]
    assert found.active == [4 * MIB, 6 * MIB, 2 * MIB]
    assert found.reserved == [20 * MIB] * 3
    assert at_peak(found)[1] == {"there before": 4 * MIB, "block": 2 * MIB}
    assert at_peak(memory_map([event("free_completed", BIG)], before)) == (0, {"there before": 4 * MIB})


def test_rectangles_never_overlap_although_addresses_are_used_again():
    """Segments come and go at the same addresses, with other sizes."""
    dice, trace, open_ = random.Random(0), [], {}
    for _ in range(400):
        address = dice.randrange(6) * 64 * MIB
        if address in open_:
            trace += [event("free_completed", block) for block in open_.pop(address)]
            trace.append(event("segment_free", address))
        else:
            size = dice.choice((2 * MIB, 20 * MIB, 64 * MIB))
            trace.append(event("segment_alloc", address, size))
            open_[address] = [address + k * size // 4 for k in range(4) if dice.random() < 0.7]
            trace += [event("alloc", place, size // 4) for place in open_[address]]
    found = memory_map(trace)
    for spans in (found.blocks, found.segments):
        for k, one in enumerate(spans):
            for other in spans[:k]:
                apart = one.offset + one.size <= other.offset or other.offset + other.size <= one.offset
                assert apart or one.death <= other.birth or other.death <= one.birth
    for block in found.blocks:
        assert any(
            home.offset <= block.offset
            and block.offset + block.size <= home.offset + home.size
            and home.birth <= block.birth
            and block.death <= home.death
            for home in found.segments
        )

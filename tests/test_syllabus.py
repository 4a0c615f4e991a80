"""syllabus.toml against facts of the specification that are written here by hand, and what `load` refuses."""

import re

import pytest

from course.syllabus import SYLLABUS_FILE, SyllabusError, direct_needs, load

TEXT = SYLLABUS_FILE.read_text(encoding="utf-8")
# number, title, prerequisites, data set, what it owns
SPECIFICATION = """
15-01 | Custom Autograd Functions & Hooks | 5-06 5-07 | FashionMNIST | Custom autograd functions and hooks
15-02 | Advanced Data Pipelines | 1-05 5-07 | FashionMNIST | Advanced data pipelines (samplers, collate_fn)
15-03 | Advanced nn.Module Patterns | 5-07 | FashionMNIST | Advanced nn.Module patterns (state_dict surgery)
15-04 | Custom Loss Functions & Training Utilities | 5-04 5-07 | CIFAR-10
    | Custom loss functions, EMA, gradient utilities
15-05 | TorchScript & JIT Compilation | 5-07 15-03 | FashionMNIST | TorchScript and JIT compilation
15-06 | torch.fx & Graph Transformations | 15-05 5-07 | FashionMNIST | torch.fx graph transformations
15-07 | CUDA Memory Management & GPU Internals | 5-07 | CIFAR-10 | CUDA memory management, GPU internals
15-08 | Distributed Primitives & Communication | 5-07 | CIFAR-10
    | Distributed communication primitives (all_reduce, NCCL)
15-09 | Debugging PyTorch Models | 5-07 15-07 | CIFAR-10
    | PyTorch debugging (detect_anomaly, gradient checking, memory leaks)
15-10 | Building a Mini Training Framework | 15-01 15-02 15-03 15-04 15-05 15-06 15-07 15-08 15-09 | FashionMNIST
    | Mini training framework (Trainer pattern)
"""
ROWS = [[part.strip() for part in row.split("|")] for row in re.split(r"\n(?=15-)", SPECIFICATION.strip())]


def test_the_syllabus_is_what_the_specification_says():
    syllabus = load()
    module = syllabus.module
    assert (module.number, module.title, module.folder) == (15, "Advanced PyTorch Internals", SYLLABUS_FILE.parent.name)
    assert list(syllabus.topics)[:10] == [row[0] for row in ROWS]
    for number, title, needs, dataset, owns in ROWS:
        topic, is_capstone = syllabus.topics[number], number == "15-10"
        assert (topic.title, topic.dataset, topic.owns) == (title, dataset, owns)
        assert topic.prerequisites == needs.split()
        assert topic.path == SYLLABUS_FILE.parent / topic.file
        assert topic.category == ("E — Capstone/Integration" if is_capstone else "A — Algorithm")
        assert topic.template == f"TEMPLATE_{'CAPSTONE' if is_capstone else 'ALGORITHM'}.ipynb"
        assert (topic.time, topic.budget_seconds) == ("~8 min" if number in ("15-04", "15-10") else "~5 min", 60)
        for warning in topic.warnings:
            assert set(re.findall(r"\b\d{1,2}-\d\d\b", warning.text)) - {number} == set(warning.references)
    # the map draws only what does not follow: 15-03 and 15-05 come with 15-06, 15-07 with 15-09
    arrows = direct_needs(syllabus.topics["15-10"], syllabus.topics)
    assert arrows == ("15-01", "15-02", "15-04", "15-06", "15-08", "15-09")


ROW_3 = '[topics."15-03"]'
# (what is replaced, by what, what the message must say)
DAMAGE = [
    ('owns = "torch.fx graph transformations"\n', "", "topic 15-06: missing 1 required positional argument: 'owns'"),
    (ROW_3, f"{ROW_3}\nminuts = 5", "topic 15-03: got an unexpected keyword argument 'minuts'"),
    ('prerequisites = ["1-05", "5-07"]', 'prerequisites = "1-05"', "15-02: names '1', which is no topic"),
    (ROW_3, '[topics."15-02"]', "not valid TOML"),
    ('file = "15-03_', 'file = "15-02_', "file must look like 15-03_"),
    (ROW_3, '[topics."15-033"]', 'topic 15-033: the number must look like "15-01"'),
    ('_patterns.ipynb"', '_patterns.ipynb.bak"', "file must look like 15-03_"),
    ('template = "TEMPLATE_CAPSTONE.ipynb"', 'template = "CAPSTONE"', "topic 15-10: template is"),
    (ROW_3, f'{ROW_3}\nstatus = "done"', "topic 15-03: status is 'done'"),
    ('references = ["16-03"]', 'references = ["16.03"]', "15-07: names '16.03', which is no topic"),
    ('prerequisites = ["15-05", "5-07"]', 'prerequisites = ["15-25"]', "15-06: names '15-25', which is no topic"),
    ('prerequisites = ["5-07"]', 'prerequisites = ["15-10"]', "no topic; prerequisites stand above"),
    ("[module]", "[modul]", "needs the table [module]"),
    ('repository = ""', 'repository = "example.org/course"', "[module]: repository"),
    ("[module]", "\udcff[module]", "not UTF-8 text"),
]


@pytest.mark.parametrize(("old", "new", "message"), DAMAGE)
def test_damage_is_named(tmp_path, old, new, message):
    assert old in TEXT
    path = tmp_path / "syllabus.toml"
    path.write_text(TEXT.replace(old, new, 1), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(SyllabusError, match=re.escape(message)) as caught:
        load(path)
    assert "syllabus.toml" in str(caught.value)

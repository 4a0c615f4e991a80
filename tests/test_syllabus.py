"""syllabus.toml against facts of the specification that are written here by hand, and what `load` refuses."""

import re

import pytest

from course.syllabus import SYLLABUS_FILE, SyllabusError, direct_needs, load

TEXT = SYLLABUS_FILE.read_text(encoding="utf-8")
# number, title, prerequisites, data set, what it owns, some of its key content
SPECIFICATION = """
15-01 | Custom Autograd Functions & Hooks | 5-06 5-07 | FashionMNIST | Custom autograd functions and hooks
    | torch.autograd.Function; forward hooks for activation extraction; backward hooks; gradient accumulation hooks
15-02 | Advanced Data Pipelines | 1-05 5-07 | FashionMNIST | Advanced data pipelines (samplers, collate_fn)
    | weighted random sampling for imbalanced data; variable-length sequences (padding, packing); IterableDataset
15-03 | Advanced nn.Module Patterns | 5-07 | FashionMNIST | Advanced nn.Module patterns (state_dict surgery)
    | skip connections; parameter groups; state_dict surgery (rename, remove, reshape keys); lazy modules
15-04 | Custom Loss Functions & Training Utilities | 5-04 5-07 | CIFAR-10
    | Custom loss functions, EMA, gradient utilities
    | Focal loss, label smoothing; contrastive losses; custom metrics with running averages; gradient clipping utilities
15-05 | TorchScript & JIT Compilation | 5-07 15-03 | FashionMNIST | TorchScript and JIT compilation
    | exporting models for C++ runtime; dynamic control flow; unsupported ops; debugging traced models
15-06 | torch.fx & Graph Transformations | 15-05 5-07 | FashionMNIST | torch.fx graph transformations
    | graph IR; graph inspection and manipulation; fuse conv+bn; quantization-aware transforms
15-07 | CUDA Memory Management & GPU Internals | 5-07 | CIFAR-10 | CUDA memory management, GPU internals
    | L2 cache, HBM; PyTorch caching allocator; fragmentation and OOM debugging; pinned memory and async transfers
15-08 | Distributed Primitives & Communication | 5-07 | CIFAR-10
    | Distributed communication primitives (all_reduce, NCCL)
    | all_reduce, broadcast, all_gather, reduce_scatter; NCCL backend; ring all-reduce algorithm; process groups
15-09 | Debugging PyTorch Models | 5-07 15-07 | CIFAR-10
    | PyTorch debugging (detect_anomaly, gradient checking, memory leaks)
    | numerical gradient checking; anomalous gradient detection; in-place ops; detached tensors, wrong device
15-10 | Building a Mini Training Framework | 15-01 15-02 15-03 15-04 15-05 15-06 15-07 15-08 15-09 | FashionMNIST
    | Mini training framework (Trainer pattern)
    | on_epoch_start, on_batch_end, etc.; automatic checkpointing and resumption; lr, grad norm; EarlyStopping
"""
ROWS = [[part.strip() for part in row.split("|")] for row in re.split(r"\n(?=15-)", SPECIFICATION.strip())]


@pytest.fixture(scope="module")
def syllabus():
    return load()


def test_the_module(syllabus):
    module = syllabus.module
    assert (module.number, module.title, module.gpu_required) == (15, "Advanced PyTorch Internals", True)
    assert module.folder == SYLLABUS_FILE.parent.name
    assert list(syllabus.topics)[:10] == [row[0] for row in ROWS]
    for phrase in ("deep into the internals of PyTorch", "20-module curriculum", "Modules 5-14", "MLOps"):
        assert phrase in module.introduction


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_topic_is_what_the_specification_says(syllabus, row):
    number, title, needs, dataset, owns, content = row
    topic, capstone = syllabus.topics[number], number == "15-10"
    assert (topic.title, topic.dataset, topic.owns) == (title, dataset, owns)
    assert topic.prerequisites == tuple(needs.split())
    assert topic.path == SYLLABUS_FILE.parent / topic.file
    assert topic.category == ("E — Capstone/Integration" if capstone else "A — Algorithm")
    assert topic.template == f"TEMPLATE_{'CAPSTONE' if capstone else 'ALGORITHM'}.ipynb"
    assert (topic.time, topic.minutes) == (("~8 min", 8) if number in ("15-04", "15-10") else ("~5 min", 5))
    assert topic.budget_seconds == 60
    assert [phrase for phrase in content.split("; ") if phrase not in topic.key_content] == []
    for warning in topic.warnings:
        assert set(re.findall(r"\b\d{1,2}-\d\d\b", warning.text)) - {number} == set(warning.references)


def test_references_to_other_modules_and_the_maps_arrows(syllabus):
    assert {number: topic.must_reference for number, topic in syllabus.topics.items() if topic.warnings} == {
        "15-04": ("5-04", "5-06", "9-06", "12-04", "16-06"),
        "15-07": ("16-03",),
        "15-09": ("16-06",),
    }
    # the map draws only what does not follow: 15-03 and 15-05 come with 15-06, 15-07 with 15-09
    arrows = direct_needs(syllabus.topics["15-10"], syllabus.topics)
    assert arrows == ("15-01", "15-02", "15-04", "15-06", "15-08", "15-09")


ROW_3 = '[topics."15-03"]'
# (what is replaced, by what, what the message must say)
DAMAGE = [
    ('owns = "torch.fx graph transformations"\n', "", "topic 15-06: missing 1 required positional argument: 'owns'"),
    (ROW_3, f"{ROW_3}\nminuts = 5", "topic 15-03: got an unexpected keyword argument 'minuts'"),
    ("minutes = 5\nbudget", 'minutes = "5"\nbudget', "minutes must be of type int, not '5'"),
    ('prerequisites = ["1-05", "5-07"]', 'prerequisites = "1-05"', "15-02: prerequisites: must be a list, not '1-05'"),
    (ROW_3, f"{ROW_3}\nwarnings = 3", "15-03: warnings: must be a list, not 3"),
    (ROW_3, f"{ROW_3}\nwarnings = [3]", "15-03: warning 1: must be a table, not 3"),
    (ROW_3, f'[topics]\n"15-11" = 3\n{ROW_3}', "15-11: must be a table, not 3"),
    ("gpu_required = true\n", "", "[module]: missing 1 required positional argument: 'gpu_required'"),
    (ROW_3, '[topics."15-02"]', "not valid TOML"),
    ('"Debugging PyTorch Models"', '"Advanced Data Pipelines"', "15-02: another topic has the title"),
    ('file = "15-03_', 'file = "15-02_', "file must look like 15-03_"),
    (ROW_3, '[topics."16-03"]', 'topic 16-03: the number must look like "15-01"'),
    ('template = "TEMPLATE_CAPSTONE.ipynb"', 'template = "CAPSTONE"', "topic 15-10: template is"),
    (ROW_3, f'{ROW_3}\nstatus = "done"', "topic 15-03: status is 'done'"),
    ('references = ["16-03"]', 'references = ["16.03"]', "15-07: warning 1: references holds"),
    ('prerequisites = ["15-05", "5-07"]', 'prerequisites = ["15-25"]', "names 15-25, which is no"),
    ('prerequisites = ["15-05", "5-07"]', 'prerequisites = ["15-10"]', "lead back to"),
    ("[module]", "[modul]", "needs the table [module]"),
]


@pytest.mark.parametrize(("old", "new", "message"), DAMAGE)
def test_damage_is_named(tmp_path, old, new, message):
    assert old in TEXT
    path = tmp_path / "syllabus.toml"
    path.write_text(TEXT.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(SyllabusError, match=re.escape(message)) as caught:
        load(path)
    assert "syllabus.toml" in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read(tmp_path, content):
    if content is not None:
        (tmp_path / "syllabus.toml").write_bytes(content)
    with pytest.raises(SyllabusError, match="can't be read as UTF-8 text"):
        load(tmp_path / "syllabus.toml")

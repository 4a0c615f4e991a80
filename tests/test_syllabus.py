"""syllabus.toml against facts of the specification that are written here by hand, and what `load` refuses."""

import re
from dataclasses import replace

import pytest

from course.syllabus import SYLLABUS_FILE, SyllabusError, direct_needs, load

TEXT = SYLLABUS_FILE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def syllabus():
    """The syllabus, with the specification's ten topics only: a module may add others."""
    real = load()
    return replace(real, topics=dict(list(real.topics.items())[:10]))


def test_ten_topics_in_order(syllabus):
    assert list(syllabus.topics) == [f"15-{n:02d}" for n in range(1, 11)]
    assert syllabus.module.number == 15
    assert syllabus.module.title == "Advanced PyTorch Internals"
    assert syllabus.module.folder == SYLLABUS_FILE.parent.name == "module_15_advanced_pytorch_internals"
    assert syllabus.module.gpu_required


def test_titles(syllabus):
    assert [topic.title for topic in syllabus.topics.values()] == [
        "Custom Autograd Functions & Hooks",
        "Advanced Data Pipelines",
        "Advanced nn.Module Patterns",
        "Custom Loss Functions & Training Utilities",
        "TorchScript & JIT Compilation",
        "torch.fx & Graph Transformations",
        "CUDA Memory Management & GPU Internals",
        "Distributed Primitives & Communication",
        "Debugging PyTorch Models",
        "Building a Mini Training Framework",
    ]


def test_prerequisites_chain(syllabus):
    chain = """15-01: 5-06 5-07 | 15-02: 1-05 5-07 | 15-03: 5-07 | 15-04: 5-04 5-07 | 15-05: 5-07 15-03
        | 15-06: 15-05 5-07 | 15-07: 5-07 | 15-08: 5-07 | 15-09: 5-07 15-07
        | 15-10: 15-01 15-02 15-03 15-04 15-05 15-06 15-07 15-08 15-09"""
    for row in chain.split("|"):
        number, needs = row.strip().split(": ")
        assert syllabus.topics[number].prerequisites == tuple(needs.split()), number


def test_capstone_requires_the_nine_others(syllabus):
    capstone = syllabus.topics["15-10"]
    assert set(capstone.prerequisites) == set(syllabus.topics) - {"15-10"}
    # the map draws only what does not follow: 15-03 and 15-05 come with 15-06, 15-07 with 15-09
    assert direct_needs(capstone, syllabus.topics) == ("15-01", "15-02", "15-04", "15-06", "15-08", "15-09")


def test_categories_and_templates(syllabus):
    for number, topic in syllabus.topics.items():
        if number == "15-10":
            assert (topic.category, topic.template) == ("E — Capstone/Integration", "TEMPLATE_CAPSTONE.ipynb")
        else:
            assert (topic.category, topic.template) == ("A — Algorithm", "TEMPLATE_ALGORITHM.ipynb")


def test_datasets_and_times(syllabus):
    topics = syllabus.topics.values()
    assert [t.number for t in topics if t.dataset == "CIFAR-10"] == ["15-04", "15-07", "15-08", "15-09"]
    assert sum(t.dataset == "FashionMNIST" for t in topics) == 6
    assert [t.number for t in topics if t.time == "~8 min"] == ["15-04", "15-10"]
    assert sum(t.time == "~5 min" for t in topics) == 8
    assert sum(t.minutes for t in topics) == 56
    assert all(t.budget_seconds == 60 for t in topics)


def test_ownership(syllabus):
    assert [topic.owns for topic in syllabus.topics.values()] == [
        "Custom autograd functions and hooks",
        "Advanced data pipelines (samplers, collate_fn)",
        "Advanced nn.Module patterns (state_dict surgery)",
        "Custom loss functions, EMA, gradient utilities",
        "TorchScript and JIT compilation",
        "torch.fx graph transformations",
        "CUDA memory management, GPU internals",
        "Distributed communication primitives (all_reduce, NCCL)",
        "PyTorch debugging (detect_anomaly, gradient checking, memory leaks)",
        "Mini training framework (Trainer pattern)",
    ]


def test_key_content_and_descriptions_are_the_specification_s(syllabus):
    """Every text by its first and last words."""
    key = {
        "15-01": ("torch.autograd.Function — custom forward", "use cases (e.g., custom gradient clipping)"),
        "15-02": ("Custom Sampler and BatchSampler;", "streaming large datasets; pin_memory and prefetching"),
        "15-03": ("Dynamic architecture (conditional layers,", "module hooks for logging and debugging"),
        "15-04": ("Focal loss, label smoothing", "EMA (exponential moving average) of model weights"),
        "15-05": ("Tracing vs scripting — when", "comparison with torch.export (newer API)"),
        "15-06": ("Symbolic tracing of nn.Module", "connection to torch.compile internals"),
        "15-07": ("GPU memory hierarchy (registers,", "compute/transfer overlap (CS336 Lecture 5)"),
        "15-08": ("Point-to-point (send/recv) and", "building blocks for DDP/FSDP in Module 16"),
        "15-09": ("autograd.detect_anomaly for NaN/Inf", "detection with gc and torch.cuda.memory_stats"),
        "15-10": ("Trainer class with callback", "understanding what Lightning/Fabric abstract away"),
    }
    detail = {
        "15-01": ("Students will extend PyTorch's", "custom training utilities (15-04) later in the module."),
        "15-02": ("This topic covers the advanced data", "that are not the training bottleneck."),
        "15-03": ("Students will learn advanced patterns", "and the training framework (15-10)."),
        "15-04": ("This topic implements a collection", "and the training framework capstone (15-10)."),
        "15-05": ("Students will export PyTorch models", "connecting forward to deployment concerns in Module 20."),
        "15-06": ("This topic introduces `torch.fx`,", "what happens when they call `torch.compile(model)`."),
        "15-07": ("Students will develop a deep", "implemented following CS336 Lecture 5 principles."),
        "15-08": ("This topic covers the low-level", "distributed training strategies in Module 16."),
        "15-09": ("Students will build a systematic", "memory management concepts from 15-07."),
        "15-10": ("The capstone topic brings together", "into a cohesive training infrastructure."),
    }
    for number, topic in syllabus.topics.items():
        for text, (first, last) in ((topic.key_content, key[number]), (topic.description, detail[number])):
            assert text.startswith(first), number
            assert text.endswith(last), number
            assert text == text.strip()
            assert "  " not in text
    assert syllabus.module.introduction.startswith("Module 15 takes students deep into the internals of PyTorch,")
    assert syllabus.module.introduction.endswith("the systems fluency to scale their models to production.")


# what the specification names between the first and the last words: in the key content, in the description
NAMED = {
    "15-01": (
        "forward and backward; forward hooks for activation extraction; backward hooks; gradient accumulation hooks",
        "numerical stability; feature visualization and transfer learning; custom regularization; parameter level",
    ),
    "15-02": (
        "weighted random sampling for imbalanced data; variable-length sequences (padding, packing); IterableDataset",
        "`Sampler` and `BatchSampler`; minority classes; pack_padded_sequence; from disk or network; `num_workers`",
    ),
    "15-03": (
        "skip connections; parameter groups; state_dict surgery (rename, remove, reshape keys); lazy modules",
        "input properties; weight decay; checkpoint keys; first forward pass; TorchScript export (15-05)",
    ),
    "15-04": (
        "contrastive losses; custom metrics with running averages; gradient clipping utilities",
        "hard cases; overconfident; metric learning; norm-based and value-based; shadow copy; exponential smoothing",
    ),
    "15-05": (
        "exporting models for C++ runtime; dynamic control flow; unsupported ops; debugging traced models",
        "sample forward pass; TorchScript IR; data-dependent branching; type annotation; `torch.export`",
    ),
    "15-06": (
        "graph IR; graph inspection and manipulation; fuse conv+bn; quantization-aware transforms",
        "placeholder inputs, call_function nodes, call_module nodes, and output; Conv2d and BatchNorm; insertion",
    ),
    "15-07": (
        "L2 cache, HBM; PyTorch caching allocator; fragmentation and OOM debugging; pinned memory and async transfers",
        "`torch.cuda.memory_allocated()` differs from `nvidia-smi`; returning it to CUDA; overlapping compute and data",
    ),
    "15-08": (
        "all_reduce, broadcast, all_gather, reduce_scatter; NCCL backend; ring all-reduce algorithm; process groups",
        "parameter initialization; FSDP-style; in O(1) time relative to the number of workers",
    ),
    "15-09": (
        "numerical gradient checking; anomalous gradient detection; in-place ops; detached tensors, wrong device",
        "finite differences; exploding or vanishing; `.detach()`; incorrect broadcasting; garbage collector",
    ),
    "15-10": (
        "on_epoch_start, on_batch_end, etc.; automatic checkpointing and resumption; lr, grad norm; EarlyStopping",
        "on_backward; latest checkpoint; device management, gradient accumulation, mixed precision; hooks (15-01)",
    ),
}


def test_the_texts_name_what_the_specification_names(syllabus):
    assert set(NAMED) == set(syllabus.topics)
    for number, topic in syllabus.topics.items():
        for text, named in zip((topic.key_content, topic.description), NAMED[number], strict=True):
            missing = [phrase for phrase in named.split("; ") if phrase not in text]
            assert not missing, f"{number}: {missing}"
    for phrase in ("JIT compilation, graph transformations", "20-module curriculum", "Modules 5-14", "MLOps"):
        assert phrase in syllabus.module.introduction


def test_cross_module_warnings(syllabus):
    required = {number: topic.must_reference for number, topic in syllabus.topics.items() if topic.warnings}
    assert required == {
        "15-04": ("5-04", "5-06", "9-06", "12-04", "16-06"),
        "15-07": ("16-03",),
        "15-09": ("16-06",),
    }
    assert [len(topic.warnings) for topic in syllabus.topics.values()] == [0, 0, 0, 3, 0, 0, 1, 0, 1, 0]


def test_every_number_in_a_warning_is_a_reference(syllabus):
    for topic in syllabus.topics.values():
        for warning in topic.warnings:
            named = set(re.findall(r"\b\d{1,2}-\d\d\b", warning.text)) - {topic.number}
            assert named == set(warning.references)


def test_files(syllabus):
    for topic in syllabus.topics.values():
        assert topic.path == SYLLABUS_FILE.parent / topic.file
        assert topic.path.is_absolute()
    assert syllabus.topics["15-01"].file == "15-01_custom_autograd_functions_and_hooks.ipynb"
    assert syllabus.topics["15-10"].file == "15-10_building_a_mini_training_framework.ipynb"


ROW_3 = '[topics."15-03"]'
# (what is replaced, by what, what the message must say)
DAMAGE = {
    "missing key": ('owns = "torch.fx graph transformations"\n', "", "topic 15-06: key 'owns' is missing"),
    "unknown key": (ROW_3, f"{ROW_3}\nminuts = 5", "topic 15-03: unknown key 'minuts'"),
    "wrong type": ('prerequisites = ["1-05", "5-07"]', 'prerequisites = "1-05"', "15-02: prerequisites must be"),
    "bool is no number": ("number = 15\n", "number = true\n", "[module]: number must be of type int"),
    "module key": ("gpu_required = true\n", "", "[module]: key 'gpu_required' is missing"),
    "duplicate table": (ROW_3, '[topics."15-02"]', "not valid TOML"),
    "duplicate title": (
        'title = "Debugging PyTorch Models"',
        'title = "Advanced Data Pipelines"',
        "15-02: another topic has the title",
    ),
    "file of another topic": (
        'title = "Advanced nn.Module Patterns"\nfile = "15-03_advanced_nn_module_patterns.ipynb"',
        'title = "Advanced nn.Module Patterns"\nfile = "15-02_advanced_data_pipelines.ipynb"',
        "file must look like 15-03_",
    ),
    "number of another module": (ROW_3, '[topics."16-03"]', 'topic 16-03: the number must look like "15-01"'),
    "unknown template": ('template = "TEMPLATE_CAPSTONE.ipynb"', 'template = "CAPSTONE"', "topic 15-10: template is"),
    "unknown status": (ROW_3, f'{ROW_3}\nstatus = "done"', "topic 15-03: status is 'done'"),
    "a number that is none": ('references = ["16-03"]', 'references = ["16.03"]', "15-07: warning 1: references holds"),
    "given twice": (
        'prerequisites = ["5-04", "5-07"]',
        'prerequisites = ["5-07", "5-07"]',
        "15-04: prerequisites",
    ),
    "not in the module": ('prerequisites = ["15-05", "5-07"]', 'prerequisites = ["15-25"]', "names 15-25, which is no"),
    "a circle": ('prerequisites = ["15-05", "5-07"]', 'prerequisites = ["15-10"]', "lead back to"),
    "empty text": ('owns = "TorchScript and JIT compilation"', 'owns = " "', "topic 15-05: owns must be"),
    "not positive": (
        "minutes = 5\nbudget_seconds = 60",
        "minutes = 5\nbudget_seconds = 0",
        "budget_seconds must be",
    ),
    "not TOML": ("[module]", "[module", "not valid TOML"),
    "a topic that is no table": ("[module]", '[topics]\n"15-98" = 3\n\n[module]', "15-98: must be a table, not 3"),
}


@pytest.mark.parametrize(("old", "new", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(tmp_path, old, new, message):
    assert old in TEXT
    path = tmp_path / "syllabus.toml"
    path.write_text(TEXT.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(SyllabusError, match=re.escape(message)) as caught:
        load(path)
    assert "syllabus.toml" in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"[module]\n[topics]\n"])
def test_file_that_is_no_syllabus(tmp_path, content):
    if content is not None:
        (tmp_path / "syllabus.toml").write_bytes(content)
    with pytest.raises(SyllabusError, match="syllabus"):
        load(tmp_path / "syllabus.toml")


def test_objects_are_frozen(syllabus):
    with pytest.raises(AttributeError):
        syllabus.topics["15-01"].title = "other"

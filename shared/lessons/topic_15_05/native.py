"""What leaves Python in 15-05: a C++ program, built in the background, and packages of exported programs."""

import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch.export import ExportedProgram

from shared.quick_compiler import quick_compiler
from shared.quiet import quiet

COMPILER = None if os.name == "nt" else shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")

CPP = """\
// these headers instead of <torch/script.h>, which takes longer to compile
#include <ATen/ops/from_file.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <filesystem>
#include <fstream>

// infer FORMAT MODEL IMAGES LOGITS SIDE: raw float32 in, raw float32 out
int main(int argc, char** argv) {
  if (argc != 6) return 2;
  c10::InferenceMode no_gradients;
  const int64_t side = std::stoi(argv[5]);  // an image has side x side pixels
  const int64_t n = std::filesystem::file_size(argv[3]) / (4 * side * side);
  auto images = at::from_file(argv[3], false, n * side * side).view({n, 1, side, side});

  at::Tensor logits;
  if (std::string(argv[1]) == "torchscript") {
    logits = torch::jit::load(argv[2]).forward({images}).toTensor();
  } else {
    logits = torch::inductor::AOTIModelPackageLoader(argv[2]).run({images})[0];
  }

  logits = logits.contiguous();
  std::ofstream(argv[4], std::ios::binary)
      .write(reinterpret_cast<const char*>(logits.data_ptr<float>()), logits.nbytes());
}
"""


def start_build(target: Path) -> subprocess.Popen | None:
    """Start to compile CPP against PyTorch's own headers and libraries; None without a compiler."""
    if COMPILER is None:
        return None
    target.with_suffix(".cpp").write_text(CPP)
    root = Path(torch.__file__).parent
    parts = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", f"-L{root}/lib"]
    command = [COMPILER, "-std=c++20", "-O0", f"{target}.cpp", *parts, f"-Wl,-rpath,{root}/lib"]
    command += ["-ltorch", "-ltorch_cpu", "-lc10", "-o", str(target)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish_build(build: subprocess.Popen | None) -> bool:
    """Wait for the compiler; whether there is a program now."""
    if build is None:
        return False
    log, _ = build.communicate(timeout=300)
    if build.returncode != 0:
        print("the build failed:", log[:500])
    return build.returncode == 0


def package(program: ExportedProgram, path: Path) -> str | None:
    """Compile the program into an AOTInductor package; None where that can't be done, or COURSE_AOTI is 0."""
    if COMPILER is None or os.environ.get("COURSE_AOTI") == "0":
        return None
    try:
        with quiet(), quick_compiler():
            return torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    except Exception as error:  # a compiler that doesn't work, a folder with a space
        print("the compiler failed:", type(error).__name__)
        return None

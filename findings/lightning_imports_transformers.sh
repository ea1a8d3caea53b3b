#!/usr/bin/env bash
# Lightning 2.6 with torchmetrics 1.9, where transformers is installed: `import lightning` imports models of transformers, in each rank.
#
# Expected: a package that is installed beside Lightning is imported where something of it is used.
# Observed: Lightning imports torchmetrics, whose functional text metrics import AutoModel as they are imported themselves, and with it
# transformers' code for generation and for distributed models. Where it is not installed, none of that happens.
# It reaches users as seconds of a core in every process that a launcher starts, whatever it trains: here 3.7 s instead of 2.1 s.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "lightning==2.6.6" "torchmetrics==1.9.0" "numpy==2.2.6"
cat > "$folder/program.py" <<'PROGRAM'
import sys
import time

begin = time.process_time()
import lightning as L  # noqa: E402

seconds = time.process_time() - begin
import torchmetrics  # noqa: E402

loaded = sorted(name for name in sys.modules if name.startswith("transformers."))
print("lightning", L.__version__, "torchmetrics", torchmetrics.__version__)
print(f"{len(loaded)} modules of transformers; {seconds:.1f} s of a core")
has_transformers = sys.argv[1] == "with"
assert ("transformers.models.auto.modeling_auto" in loaded) == has_transformers
assert ("transformers.generation.utils" in loaded) == has_transformers
PROGRAM
"$folder/venv/bin/python" -W ignore "$folder/program.py" without
"$folder/venv/bin/pip" install --quiet "transformers==5.18.0"
"$folder/venv/bin/python" -W ignore "$folder/program.py" with

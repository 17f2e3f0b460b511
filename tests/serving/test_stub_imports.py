"""What the stub may import."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def test_the_stub_never_imports_torch(tmp_path):
    (tmp_path / "triton_python_backend_utils.py").write_text("TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1\n")
    code = """
        import sys
        import mstar.serving.backend
        heavy = {"torch", "transformers", "flashinfer", "triton"} & set(sys.modules)
        sys.exit(f"imported: {heavy}" if heavy else 0)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

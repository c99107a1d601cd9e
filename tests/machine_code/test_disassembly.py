"""Finding nvdisasm."""

from cute_attn.machine_code.disassembly import find_nvdisasm


def test_nvdisasm_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("NVDISASM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    tool = tmp_path / "toolkit" / "bin" / "nvdisasm"
    tool.parent.mkdir(parents=True)
    tool.write_text("")
    assert find_nvdisasm() == tool
    monkeypatch.setenv("NVDISASM", str(tool))
    assert find_nvdisasm() == tool

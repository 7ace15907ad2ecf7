"""``python -m ops.bench``: the same as ``asr bench``, where nothing is installed."""

from ops.bench.command import bench

if __name__ == "__main__":
    bench(prog_name="asr bench")

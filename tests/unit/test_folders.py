"""Folders whose files are bounded."""

import os

from sd_tpu.folders import keep_within


def test_what_was_used_least_lately_goes_until_the_rest_fits(tmp_path):
    (tmp_path / "a folder").mkdir()
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    for name, used, written in (("read", 3, 0), ("written", 0, 2), ("older", 1, 1)):
        (tmp_path / name).write_bytes(b"1234")
        os.utime(tmp_path / name, (used, written))
    keep_within(tmp_path, 8)
    assert {each.name for each in tmp_path.iterdir()} == {"a folder", "gone", "read", "written"}
    keep_within(tmp_path, 8, "a folder/*")
    assert (tmp_path / "read").is_file()
    keep_within(tmp_path, 7)
    assert not (tmp_path / "written").exists() and (tmp_path / "read").is_file()

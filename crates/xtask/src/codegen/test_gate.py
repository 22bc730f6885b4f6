"""Tests of what gate.py makes of rows: `python3 -m unittest` in this folder."""

import pathlib
import unittest

import gate

DOCS = pathlib.Path(__file__).parents[4] / "docs"


def rows(text, key=0):
    """Rows, each with a key of its own in place of a hash: a number from `key` on."""
    lines = [f"{line} {n:04x}".split() for n, line in enumerate(text.splitlines(), key)]
    return gate.parse("\n".join("\t".join(line) for line in [gate.COLUMNS, *lines]))


def spills(*lines):
    return gate.parse_spills("\n".join("\t".join(line) for line in [gate.SPILL_COLUMNS, *lines]))


class Gate(unittest.TestCase):
    def test_the_committed_table_is_written_as_it_is_read(self):
        text = (DOCS / "codegen.tsv").read_text()
        self.assertEqual(gate.written(gate.parse(text)), text)
        header, row, *_ = text.splitlines()
        for bad in ["variant\tregisters\n", f"{header}\na\tsm_80\t1\t2\n", f"{header}\n{row.rsplit(chr(9), 1)[0]}\n"]:
            self.assertRaises(SystemExit, gate.parse, bad)

    def test_growth_beyond_the_bounds_is_a_fault(self):
        old = rows("a sm_80 40 0 0 0 1024 8 4")
        for better in ["a sm_80 48 0 0 16 1280 8 4", "a sm_80 20 0 0 0 0 9 5"]:
            self.assertEqual(list(gate.growth(rows(better, key=1), old)), [])
        beyond = rows("a sm_80 49 0 0 17 1281 7 3", key=1)
        expected = [
            "a sm_80: registers 40 -> 49, more than 8 above",
            "a sm_80: stack 0 -> 17, more than 16 above",
            "a sm_80: shared 1024 -> 1281, more than 256 above",
            "a sm_80: mma instructions 8 -> 7",
            "a sm_80: wgmma instructions 4 -> 3",
        ]
        self.assertEqual(list(gate.growth(beyond, old)), expected)

    def test_new_and_lost_kernels_are_faults_and_other_figures_of_the_same_source(self):
        old = rows("a sm_80 40 0 0 0 0 0 0")
        new = rows("b sm_80 40 0 0 0 0 0 0")
        lost = "a sm_80: in the committed table, but no longer generated"
        self.assertEqual(list(gate.growth(new, old)), ["b sm_80: not in the committed table", lost])
        other = rows("a sm_80 41 0 0 0 0 0 0")
        self.assertIn("for the same source", *gate.growth(other, old))

    def test_spills_and_missing_instructions_are_violations_whatever_is_committed(self):
        found = gate.violations(
            rows(
                """x.a_mma sm_80 40 0 0 0 0 0 7
                   x.a_mma-2 sm_80 40 0 0 0 0 7 0
                   x.a_wgmma sm_90a 40 0 0 0 0 7 0
                   x.delta_mma sm_80 40 0 0 0 0 0 0
                   x.dq sm_80 40 8 16 0 0 0 0
                   x.dq sm_90a 40 8 16 0 166913 0 0
                   y.dq sm_80 40 20 16 0 166913 0 0"""
            ),
            spills(("*.dq", "sm_80", "16", "reason")),
        )
        expected = [
            "x.a_mma sm_80: has no mma instruction",
            "x.a_wgmma sm_90a: has no wgmma instruction",
            "x.dq sm_90a: spills 16 bytes, docs/codegen-spills.tsv allows 0",
            "y.dq sm_80: 166913 bytes of shared memory, the architecture has 166912",
            "y.dq sm_80: spills 20 bytes, docs/codegen-spills.tsv allows 16",
        ]
        self.assertEqual(list(found), expected)

    def test_the_widest_allowance_holds_and_idle_ones_are_told(self):
        accepted = spills(("*.dq", "*", "8", "why"), ("x.*", "sm_80", "16", "why"), ("z", "*", "4", "why"))
        kernels = rows("x.dq sm_80 40 16 0 0 0 0 0\nx.dq_mma sm_90a 40 8 0 0 0 1 0\nz sm_80 40 0 0 0 0 0 0")
        self.assertIn("x.dq_mma sm_90a: spills 8 bytes", *gate.violations(kernels, accepted))
        self.assertIn("z *: docs/codegen-spills.tsv excuses spills", *gate.unused(kernels, accepted))

    def test_an_allowance_needs_a_reason(self):
        self.assertRaises(SystemExit, spills, ("*.dq", "*", "8", " "))
        self.assertRaises(SystemExit, gate.parse_spills, "variant\tarch\n")


if __name__ == "__main__":
    unittest.main()

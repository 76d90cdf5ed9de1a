"""A text that does something wherever it is shown as it is; without a slash, so that files can have this name."""

HOSTILE = (
    "=HYPERLINK(1)|`b`\\end{tabular}<script>x\x1b[31m\x9b2J\u202e\u2066\nforged [red]*i* _u_ $m$ :skull: [a](b) ![c][d]"
)

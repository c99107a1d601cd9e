"""Listings of kernels with the roles of the hd256 forward, in as few instructions as possible."""

from cute_attn.machine_code.listing import functions

WAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R4"
SCORE = "UTCHMMA.2CTA gdesc[UR8], gdesc[UR4], tmem[UR6], tmem[UR4], idesc[UR5], UPT"
OUTPUT = "UTCHMMA.2CTA tmem[UR8], gdesc[UR4], tmem[UR6], tmem[UR4], idesc[UR5], UPT"


def loop(label, *body):
    return [f"{label}:", *body, f"@P1 BRA `({label})"]


def kernel(roles):
    """The listing of a kernel that goes through the roles' loops one after the other."""
    lines = ['\t.section\t.text.made,"ax",@progbits']
    address = 0
    for role in roles:
        for text in role:
            if text.startswith(".L") and text.endswith(":"):
                lines.append(text)
                continue
            predicate, _, rest = text.rpartition("@P1 ") if text.startswith("@") else ("", "", text)
            del predicate
            prefix = "@P1" if text.startswith("@") else "   "
            lines.append(f"        /*{address:04x}*/  {prefix} {rest} ;")
            address += 16
    lines.append(f"        /*{address:04x}*/      EXIT ;")
    (function,) = functions("\n".join(lines))
    return function


def made(**changes):
    """A kernel with the roles of hd256-fwd, in as few instructions as possible."""
    softmax = [WAIT, *["LDTM.x32 R4, tmem[UR4]"] * 4, *["MUFU.EX2 R0, R1"] * 128]
    softmax += ["FFMA2 R0, R2, R4, R6"] * 64 + ["STTM.x32 tmem[UR4], R4"] * 2
    roles = {
        "load": loop(".L_load", WAIT, *["UTMALDG.4D.2CTA [UR8], [UR6], desc[URZ]"] * 6),
        "mma": loop(".L_mma", WAIT, *[SCORE] * 16, *[OUTPUT] * 8),
        "masked": loop(".L_masked", *softmax, *["FSEL R0, R0, -INF , P0"] * 128),
        "softmax": loop(".L_softmax", *softmax),
        "correction": loop(
            ".L_correction",
            WAIT,
            "LDS R0, [R1]",
            "@P1 BRA `(.L_done)",
            *loop(
                ".L_rescale",
                "LDTM.x32 R4, tmem[UR4]",
                *["FMUL2 R4, R4, R0"] * 16,
                "STTM.x32 tmem[UR4], R4",
            ),
            ".L_done:",
            "SYNCS.ARRIVE.TRANS64.RED.ART0 RZ, [UR4], R4",
        ),
        **changes,
    }
    return kernel(roles.values())

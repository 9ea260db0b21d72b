"""DCGM exporter pages: MiB, blanks, pods, MIG, an exporter that lost its driver."""

from __future__ import annotations

import asyncio
import math

import pytest
from aiohttp import ClientSession, web
from prometheus_client.parser import text_string_to_metric_families

from services.errors import DeviceError
from services.telemetry.sources.dcgm import DcgmGpu, gpus_of

MIB = 1 << 20
A = 'gpu="0",UUID="GPU-a",device="nvidia0",modelName="NVIDIA H100"'
PAGE = f"""\
# HELP DCGM_FI_DEV_FB_TOTAL Total framebuffer (in MiB).
# TYPE DCGM_FI_DEV_FB_TOTAL gauge
DCGM_FI_DEV_FB_TOTAL{{{A}}} 81559
# TYPE DCGM_FI_DEV_FB_FREE gauge
DCGM_FI_DEV_FB_FREE{{{A}}} 60000
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{{{A}}} 21000
# TYPE DCGM_FI_DEV_FB_RESERVED gauge
DCGM_FI_DEV_FB_RESERVED{{{A}}} 559
# TYPE DCGM_FI_PROF_DRAM_ACTIVE gauge
DCGM_FI_PROF_DRAM_ACTIVE{{{A}}} 0.42
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{{{A}}} 87
"""


def read(page: str) -> tuple[DcgmGpu, ...]:
    return gpus_of(text_string_to_metric_families(page))


def gauge(name: str, *samples: str) -> str:
    return f"# TYPE {name} gauge\n" + "".join(f"{name}{sample}\n" for sample in samples)


async def test_a_page_over_real_http_gives_bytes_and_ratios() -> None:
    async def serve(_: web.Request) -> web.Response:
        return web.Response(text=PAGE)

    app = web.Application()
    app.router.add_get("/metrics", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
            (gpu,) = read(await answer.text())
    finally:
        await runner.cleanup()
        await asyncio.sleep(0)
    assert (gpu.uuid, gpu.hbm_bytes, gpu.used_bytes) == ("GPU-a", 81559 * MIB, 21000 * MIB)
    assert (gpu.dram_active, gpu.gpu_util) == (0.42, 0.87)
    assert math.isnan(gpu.sm_active), "not told"
    assert gpu.flags == ()


@pytest.mark.parametrize(
    "value", ["2147483632", "2147483634", "9223372036854775794", "9223372036854775792", "1.40737488355328e+14"]
)
def test_a_blank_of_dcgm_is_missing_not_huge(value: str) -> None:
    (gpu,) = read(gauge("DCGM_FI_DEV_FB_USED", f"{{{A}}} {value}"))
    assert math.isnan(gpu.used_bytes)
    assert "blank" in gpu.flags[0][1]


def test_a_total_is_made_of_three_parts_or_not_at_all() -> None:
    two = gauge("DCGM_FI_DEV_FB_USED", f"{{{A}}} 10") + gauge("DCGM_FI_DEV_FB_FREE", f"{{{A}}} 20")
    assert math.isnan(read(two)[0].hbm_bytes), "the reserved part is not told, and not zero"
    three = two + gauge("DCGM_FI_DEV_FB_RESERVED", f"{{{A}}} 5")
    assert read(three)[0].hbm_bytes == 35 * MIB


def test_one_gpu_under_two_pods_is_not_added_up() -> None:
    page = gauge("DCGM_FI_DEV_FB_USED", f'{{{A},pod="x"}} 100', f'{{{A},pod="y"}} 100')
    (gpu,) = read(page)
    assert gpu.used_bytes == 100 * MIB
    assert gpu.flags == ()


def test_two_different_words_on_one_gpu_are_flagged_and_the_greater_kept() -> None:
    (gpu,) = read(gauge("DCGM_FI_DEV_FB_USED", f'{{{A},pod="x"}} 100', f'{{{A},pod="y"}} 90'))
    assert gpu.used_bytes == 100 * MIB
    assert "told twice" in gpu.flags[0][1]


def test_mig_instances_are_kept_apart_from_their_gpu() -> None:
    page = gauge(
        "DCGM_FI_DEV_FB_USED",
        f"{{{A}}} 300",
        f'{{{A},GPU_I_ID="1",GPU_I_PROFILE="1g.10gb"}} 100',
        f'{{{A},GPU_I_ID="2",GPU_I_PROFILE="1g.10gb"}} 200',
    )
    assert [(gpu.instance, gpu.profile, gpu.used_bytes // MIB) for gpu in read(page)] == [
        ("", "", 300), ("1", "1g.10gb", 100), ("2", "1g.10gb", 200),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "value"),
    [("DCGM_FI_PROF_DRAM_ACTIVE", "1.5"), ("DCGM_FI_DEV_GPU_UTIL", "250"), ("DCGM_FI_DEV_FB_USED", "-1"),
     ("DCGM_FI_PROF_SM_ACTIVE", "NaN")],
)  # fmt: skip
def test_a_value_that_cannot_be_is_left_out_and_flagged(metric: str, value: str) -> None:
    (gpu,) = read(gauge(metric, f"{{{A}}} {value}"))
    assert all(math.isnan(number) for number in gpu[4:13])
    assert gpu.flags[0][0] == metric


def test_a_hair_above_one_is_one() -> None:
    assert read(gauge("DCGM_FI_PROF_SM_ACTIVE", f"{{{A}}} 1.004"))[0].sm_active == 1.0


def test_used_and_free_beyond_the_card_are_not_believed() -> None:
    page = PAGE.replace("FB_USED{" + A + "} 21000", "FB_USED{" + A + "} 81000")
    (gpu,) = read(page)
    assert math.isnan(gpu.used_bytes)
    assert gpu.hbm_bytes == 81559 * MIB


def test_gpus_without_uuid_or_with_labels_in_lower_case_are_told_apart() -> None:
    page = gauge("DCGM_FI_DEV_FB_USED", '{gpu="0"} 1', '{gpu="1"} 2', '{uuid="GPU-c"} 3')
    assert [(gpu.gpu, gpu.uuid) for gpu in read(page)] == [("0", ""), ("1", ""), ("", "GPU-c")]


@pytest.mark.parametrize("page", ["", "# TYPE go_goroutines gauge\ngo_goroutines 9\n"])
def test_a_page_without_a_metric_of_dcgm_is_a_failed_scrape(page: str) -> None:
    with pytest.raises(DeviceError, match="empty_page"):
        read(page)

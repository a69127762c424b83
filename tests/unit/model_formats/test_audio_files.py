"""Audio files become samples at 16 kHz; files that are damaged, too large or lie are refused before they cost much."""

from __future__ import annotations

import contextlib
import tracemalloc
from random import Random

import numpy as np
import pytest

from baton.model_formats.audio import AudioLimits, UnusableAudio, decode_audio, divided, pcm_of, windows
from baton.model_formats.limits import AUDIO_RATE
from tests.support.audio_files import FORMATS, encoded, flac_that_claims, tone, wav_that_claims

LIMITS = AudioLimits(25 << 20, 60)


def refusal(data: bytes, limits: AudioLimits = LIMITS) -> str:
    with pytest.raises(UnusableAudio) as caught:
        decode_audio(data, limits)
    return str(caught.value)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (48_000, 2)])
def test_a_tone_stays_that_tone(kind: str, rate: int, channels: int) -> None:
    samples = decode_audio(encoded(tone(2, rate, channels), rate, kind), LIMITS)
    assert samples.dtype == np.int16
    assert abs(len(samples) - 2 * AUDIO_RATE) <= 16
    inner = samples[AUDIO_RATE // 2 : -AUDIO_RATE // 2].astype(float)
    assert np.argmax(np.abs(np.fft.rfft(inner))) == 440 * len(inner) // AUDIO_RATE
    assert np.abs(inner).max() == pytest.approx(0.3 * 2**15, rel=0.1)


def test_samples_of_16_bits_at_16_khz_are_kept_as_they_are() -> None:
    given = np.random.default_rng(1).integers(-(2**15), 2**15, 100_000).astype(np.int16)
    given[:2] = -(2**15), 2**15 - 1
    for kind in ("WAV PCM_16", "FLAC PCM_16"):
        found = decode_audio(encoded((given / 2**15).astype(np.float32)[:, None], kind=kind), LIMITS)
        assert np.array_equal(found, given)


def test_channels_are_averaged_and_loud_samples_clipped() -> None:
    both = np.stack([np.full(100, 0.5), np.full(100, -0.25)], axis=1).astype(np.float32)
    assert set(decode_audio(encoded(both), LIMITS)) == {4096}
    loud = np.full((100, 1), 3e38, dtype=np.float32)
    assert set(decode_audio(encoded(loud, kind="WAV FLOAT"), LIMITS)) == {2**15 - 1}


def test_the_same_file_gives_the_same_bytes() -> None:
    data = encoded(tone(3, 44_100, 2), 44_100, "OGG VORBIS")
    first, second = (decode_audio(data, LIMITS) for _ in range(2))
    assert pcm_of(first, (0, len(first))) == pcm_of(second, (0, len(second)))


def test_seven_channels_and_one_at_96_khz_are_taken() -> None:
    assert len(decode_audio(encoded(tone(1, 96_000, 8), 96_000), LIMITS)) == AUDIO_RATE
    assert "has 9 channels; at most 8" in refusal(encoded(tone(1, 16_000, 9)))


@pytest.mark.parametrize("rate", [1, 3_999, 384_001, 4_000_000])
def test_sample_rates_out_of_bounds_are_refused(rate: int) -> None:
    assert f"it has {rate} samples a second" in refusal(encoded(tone(1, 8_000), rate))


@pytest.mark.parametrize("kind", FORMATS)
def test_truncated_files_are_refused(kind: str) -> None:
    data = encoded(tone(3, 24_000), 24_000, kind)
    for size in (len(data) * 2 // 3, len(data) // 3, 600, 100, 30, 12, 10, 4):
        reason = refusal(data[:size])
        assert any(word in reason for word in ("truncated", "damaged", "no audio", "empty")), (size, reason)


def test_what_is_no_audio_is_refused() -> None:
    random = Random(1)
    assert "no audio" in refusal(b"")
    assert "no audio" in refusal(b"hello abcd")
    for start in (b"", b"RIFF\x10\0\0\0WAVE", b"fLaC", b"OggS", b"ID3", b"\xff\xfb"):
        assert refusal(start + random.randbytes(10_000))


def test_other_files_that_libsndfile_reads_are_refused() -> None:
    assert "no audio" in refusal(encoded(tone(1), kind="AIFF PCM_16"))
    assert "IMA_ADPCM" in refusal(encoded(tone(1), kind="WAV IMA_ADPCM"))


def test_empty_files_are_refused() -> None:
    for kind in ("WAV PCM_16", "WAV FLOAT"):
        assert "empty" in refusal(encoded(tone(0), kind=kind))
    # Nothing but STREAMINFO, as the last block of metadata. FLAC can't tell no samples from an unknown number.
    flac = flac_that_claims(encoded(tone(1), kind="FLAC PCM_16"), 0)
    assert "empty" in refusal(b"fLaC\x80" + flac[5:42])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_samples_that_are_no_numbers_are_refused(bad: float) -> None:
    samples = tone(1)
    samples[-1] = bad
    assert "no numbers" in refusal(encoded(samples, kind="WAV FLOAT"))


def test_headers_that_claim_too_much_are_refused() -> None:
    flac, wav = encoded(tone(1), kind="FLAC PCM_16"), encoded(tone(1))
    assert "s long; at most 60 s" in refusal(flac_that_claims(flac, 2**36 - 1))
    assert "truncated or damaged: of 2.0 s there are 1.0 s" in refusal(flac_that_claims(flac, 32_000))
    assert "truncated: its header promises 2000000000 bytes" in refusal(wav_that_claims(wav, 2_000_000_000))
    assert len(refusal(b"RF64" + wav[4:])) > 0


def test_files_that_were_written_to_a_pipe_tell_no_length_and_are_taken() -> None:
    wav, flac = wav_that_claims(encoded(tone(1)), 0xFFFFFFFF), flac_that_claims(encoded(tone(1), kind="FLAC PCM_16"), 0)
    for data in (wav, flac):
        assert len(decode_audio(data, LIMITS)) == AUDIO_RATE


def test_a_recording_has_at_most_the_permitted_length() -> None:
    exact, longer = (encoded(np.zeros((60 * 8_000 + more, 1), np.float32), 8_000, "FLAC PCM_16") for more in (0, 1))
    assert len(decode_audio(exact, LIMITS)) == 60 * AUDIO_RATE
    assert "60.0 s long; at most 60 s" in refusal(longer)
    assert "longer than the 60 s" in refusal(flac_that_claims(longer, 0))


def test_hours_of_silence_are_refused_before_they_are_decoded() -> None:
    num_samples = 2 * 3600 * 4_000
    data = encoded(np.zeros((num_samples, 1), np.float32), 4_000, "FLAC PCM_16")
    assert len(data) < 1 << 20
    tracemalloc.start()
    try:
        for claimed in (num_samples, 0):
            assert "60 s" in refusal(flac_that_claims(data, claimed))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_many_channels_at_a_high_rate_count_as_more() -> None:
    data = encoded(np.zeros((384_000 * 2, 8), np.float32), 384_000, "FLAC PCM_16")
    assert len(decode_audio(data, AudioLimits(25 << 20, 32))) == 2 * AUDIO_RATE
    assert "samples of its 8 channels" in refusal(data, AudioLimits(25 << 20, 2))


def test_a_file_has_at_most_the_permitted_bytes() -> None:
    data = encoded(tone(1))
    assert len(decode_audio(data, AudioLimits(len(data), 60))) == AUDIO_RATE
    assert f"has {len(data)} bytes; at most {len(data) - 1}" in refusal(data, AudioLimits(len(data) - 1, 60))


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_files_are_decoded_or_refused(kind: str) -> None:
    """Whatever is in a file, nothing else is raised."""
    data, random = encoded(tone(2, 24_000, 2), 24_000, kind), Random(kind)
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(random.randrange(1, 8)):
            changed[random.randrange(len(data) if random.random() < 0.5 else 100)] = random.randrange(256)
        with contextlib.suppress(UnusableAudio):
            assert len(decode_audio(bytes(changed), LIMITS)) <= 60 * AUDIO_RATE


def test_parts_are_silent_below_60_db() -> None:
    for decibels, silent in ((-57.0, set()), (-63.0, {0})):
        amplitude = 32768 * 10 ** (decibels / 20) * np.sqrt(2)
        samples = np.zeros(2 * AUDIO_RATE, np.int16)
        samples[5000:6000] = np.rint(amplitude * np.sin(np.arange(1000)))
        assert divided(samples).silent == silent
    assert divided(np.array([1000], np.int16)).silent == set()
    assert divided(np.array([1], np.int16)).silent == {0}


def test_windows_stop_where_it_is_quiet() -> None:
    samples = np.full(70 * AUDIO_RATE, 1000, dtype=np.int16)
    quiet = 27 * AUDIO_RATE
    samples[quiet : quiet + 320] = 3
    (first, second, third) = windows(samples)
    assert first == (0, quiet + 160)
    # Where it is equally quiet everywhere, all that is searched is one pause.
    assert second == (first[1], first[1] + 27.5 * AUDIO_RATE)
    assert third == (second[1], len(samples))


@pytest.mark.parametrize("noise", [0, 100])
def test_windows_stop_in_the_longest_pause_not_between_two_words(noise: int) -> None:
    word, gap = (
        np.tile(np.array([8000, -8000], dtype=np.int16), AUDIO_RATE // 8),
        np.zeros(AUDIO_RATE // 16, dtype=np.int16),
    )
    samples = np.tile(np.concatenate([word, gap]), 130)[: 36 * AUDIO_RATE]
    samples[26 * AUDIO_RATE : 27 * AUDIO_RATE] = 0
    samples += np.random.default_rng(1).normal(0, noise, len(samples)).astype(np.int16)
    ((_, stop), _) = windows(samples)
    assert stop == pytest.approx(26.5 * AUDIO_RATE, abs=0.06 * AUDIO_RATE)


@pytest.mark.parametrize("seconds", [0.01, 1, 30])
def test_a_short_recording_is_one_part(seconds: float) -> None:
    samples = np.zeros(int(seconds * AUDIO_RATE), dtype=np.int16)
    assert windows(samples) == [(0, len(samples))]


def test_parts_make_up_the_whole() -> None:
    samples = np.random.default_rng(1).integers(-(2**15), 2**15, 200 * AUDIO_RATE + 7).astype(np.int16)
    parts = windows(samples)
    assert b"".join(pcm_of(samples, part) for part in parts) == samples.tobytes()
    assert all(25 * AUDIO_RATE <= stop - start <= 30 * AUDIO_RATE for start, stop in parts[:-1])

"""Speech to text, /v1/audio: from a form with an audio file to the text. Take the endpoint and its rules from here."""

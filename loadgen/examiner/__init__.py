"""The examiner: judges candidate policies on fixed traces and in shadow, promotes them, and takes them back."""
